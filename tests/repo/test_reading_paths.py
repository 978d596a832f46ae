"""Readers find their way: each page ends with the next ones, and the first page leads to every need."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LAST = "Where to go next"


def links_of(text: str, page: Path) -> set[tuple[str, str]]:
    """(page relative to docs/, anchor or "") of every link to another page, outside of code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = set()
    for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if path.endswith(".md"):
            found.add(((page.parent / path).resolve().relative_to(DOCS).as_posix(), anchor))
    return found


def headings_of(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"^##+ (.+)$", prose, re.M)


def anchors_of(page: Path) -> set[str]:
    """The anchors that mkdocs makes of the page's headings."""
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings_of(page))
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_every_page_ends_with_where_to_go_next(page: Path) -> None:
    assert headings_of(page)[-1:] == [LAST]
    section = page.read_text(encoding="utf-8").rpartition(f"## {LAST}\n")[2]
    links = links_of(section, page)
    assert len({path for path, _ in links} - {page.relative_to(DOCS).as_posix()}) >= 2
    for path, anchor in links:
        assert (DOCS / path).is_file(), path
        assert not anchor or anchor in anchors_of(DOCS / path), f"{path}#{anchor}"


def clicks_to(target: str) -> int:
    """How many links a reader follows from the first page to `target`, by the text of the pages alone."""
    distance = {"index.md": 0}
    queue = deque(distance)
    while queue:
        name = queue.popleft()
        page = DOCS / name
        for path, _ in links_of(page.read_text(encoding="utf-8"), page):
            if path not in distance and (DOCS / path).is_file():
                distance[path] = distance[name] + 1
                queue.append(path)
    return distance.get(target, 99)


@pytest.mark.parametrize(
    ("need", "page", "heading"),
    [
        ("my own clips", "data.md", "The dataset `video_text`"),
        ("my own model", "writing-a-dit.md", "Test it"),
        ("a large model, as with DeepSpeed", "engine.md", "Module patterns"),
        ("a failed run", "ranks.md", "When a run fails"),
        ("a run that hangs", "ranks.md", "What a hang looks like"),
        ("a run that stopped", "checkpoints.md", "Resuming"),
    ],
)
def test_the_first_page_is_at_most_two_clicks_from(need: str, page: str, heading: str) -> None:
    assert heading in headings_of(DOCS / page), f"{page} does not treat {need} under this heading any more"
    assert clicks_to(page) <= 2


def test_the_commands_of_the_first_page_fit_a_telephone() -> None:
    """40 characters are 330 of 400 pixels in the site's font: seen in Chromium."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", (DOCS / "index.md").read_text(), re.M | re.S)
    assert blocks and max(len(line) for block in blocks for line in block.splitlines()) <= 40


def test_every_page_can_be_reached_by_links_in_the_text() -> None:
    names = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert {name for name in names if clicks_to(name) > 3} == set()


def test_the_navigation_has_the_groups_of_the_house() -> None:
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    groups = [next(iter(entry)) for entry in nav]
    assert groups == ["Start", "Fine-tune", "Run", "Extend", "Design"]
