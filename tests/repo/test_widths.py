"""Prose of pages is wrapped at 120 columns."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

from support.texts import ROOT, texts

COLUMNS = 120
LINK = re.compile(r"[-*\s]*!?\[[^]]*\]\([^)]*\)[,.;:]?")


def width(text: str) -> int:
    """The columns of a line in a terminal: Chinese characters and full-width punctuation take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def too_wide(text: str) -> list[int]:
    """Numbers of the lines of prose that are too wide; code, tables and lines that are one link may be."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith("|") and not LINK.fullmatch(line):
            found += [number] if width(line) > COLUMNS else []
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a" * 120, []),
        ("a" * 121, [1]),
        ("\u5b57" * 60, []),
        ("\u5b57" * 61, [1]),
        ("x\n```\n" + "a" * 121 + "\n```\n" + "b" * 121, [5]),
        ("| " + "a" * 121 + " |", []),
        (f"- [page](https://x.org/{'a' * 121})", []),
        (f"see [page](https://x.org/{'a' * 121})", [1]),
    ],
)
def test_wide_lines_are_found(text: str, found: list[int]) -> None:
    assert too_wide(text) == found


def test_no_line_of_prose_is_too_wide() -> None:
    pages = [path for path in texts() if path.suffix == ".md"]
    assert len(pages) > 50 and Path("README.zh-CN.md") in pages
    wrong = []
    for path in pages:
        text = (ROOT / path).read_text(encoding="utf-8")
        if "\n::: " not in text:  # the options of an API page, which its script writes in a line
            wrong += [f"{path}:{number}" for number in too_wide(text)]
    assert not wrong, "\n".join(wrong)
