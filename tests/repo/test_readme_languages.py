"""The README has the same headings and the same commands in both languages, in the same order."""

from __future__ import annotations

import re
from pathlib import Path

from support import pages as page

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"


def outline(readme: Path) -> list[str]:
    """Levels of the headings, names of marked code blocks, tables and images of a README, in order."""
    found, code = [], False
    for line in readme.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            code = not code
            found += [line] if code else []
        elif code:
            continue
        elif heading := re.match(r"(#+) ", line):
            found.append(heading[1])
        elif line.startswith("|---"):
            found.append(line)
        elif image := re.match(r"!\[.*\]\((.*)\)", line):
            found.append(image[1])
    return found


def first_cells(readme: Path) -> list[str]:
    """Code in the first cell of each table row: the commands and plugins that the tables explain."""
    rows = [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [found for row in rows for found in re.findall(r"`[^`]+`|\[mm-[a-z-]+\]", row.split(" | ")[0])]


def links(readme: Path) -> set[str]:
    """Pages of this repository to which a README links, without the README in the other language."""
    found = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", readme.read_text(encoding="utf-8"))
    return {target for target in found if not target.startswith("README")}


def test_both_languages_have_the_same_outline() -> None:
    """Equal number, level and order of headings; tables, images and code blocks in the same places."""
    assert outline(ENGLISH) == outline(CHINESE)
    assert outline(ENGLISH).count("##") >= 5


def test_both_languages_show_the_same_code() -> None:
    """Every code block, with its language and marker, is equal; so are the commands in blocks and tables."""
    english, chinese = ([*page.blocks(readme)] for readme in (ENGLISH, CHINESE))
    assert english == chinese
    assert page.command_lines(ENGLISH) == page.command_lines(CHINESE)


def test_the_tables_of_both_languages_explain_the_same_things() -> None:
    assert first_cells(ENGLISH) == first_cells(CHINESE)
    assert len(first_cells(ENGLISH)) > 15


def test_both_languages_link_to_the_same_pages() -> None:
    assert links(ENGLISH) == links(CHINESE)
    assert len(links(ENGLISH)) > 10
