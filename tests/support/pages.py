"""Reads the code blocks of a Markdown page, with their markers and file names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        language: language after the fence.
        text: content.
        marker: content of a comment `<!-- kind: name -->` above it.
        file: path in backticks at the start of the paragraph above it.
    """

    language: str
    text: str
    marker: str | None
    file: str | None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        above = text[: match.start()].rstrip("\n")
        paragraph = above.rpartition("\n\n")[2]
        marker = re.search(r"<!-- (.*) -->$", paragraph)
        file = re.match(r"`([\w./-]+\.\w+)`", paragraph)
        found.append(Block(match[1], match[2], marker and marker[1], file and file[1]))
    return found


def plugin_files(page: Path) -> dict[str, str]:
    """Contents of the example plugin and its config, by path."""
    return {
        block.file: block.text
        for block in blocks(page)
        if block.file is not None and block.marker is None and "small" in block.file
    }


def command_lines(page: Path) -> list[str]:
    """Every line of the page's shell blocks, then every command in its tables."""
    lines = [
        line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines() if line
    ]
    for row in re.findall(r"^\| (`.*?`.*?) \|", page.read_text(encoding="utf-8"), re.M):
        lines += re.findall(r"`([^`]+)`", row)
    return lines
