"""Fills the code blocks of pages that show the sources, so that a page cannot differ from them.

A block is filled where a comment above it names what it shows, without docstrings:

    <!-- code: mm_core/training/loop.py run_steps -->                       a function, method or class
    <!-- code: mm_core/training/loop.py run_steps | lr = | losses -->       from one line to another
                                                        (the first two lines that begin with these words)

python docs/generate_code.py            fills the blocks
python docs/generate_code.py --check    exits 1 when a page is not what would be written
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from textwrap import dedent

from generated_page import DOCS, main

ROOT = DOCS.parent

_BLOCK = re.compile(
    r"<!-- code: (?P<file>\S+) (?P<name>[\w.]+)(?: \| (?P<first>.+?) \| (?P<last>.+?))? -->\n"
    r"(?:```.*?^```\n)?",
    re.M | re.S,
)


def definition(source: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The function, class or (`Class.method`) method of that name."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for part in name.split("."):
        matching = [node for node in body if getattr(node, "name", None) == part]
        if len(matching) != 1 or not isinstance(matching[0], ast.FunctionDef | ast.ClassDef):
            raise SystemExit(f"error: there is not exactly one {name}")
        found, body = matching[0], matching[0].body
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    return found


def code_of(source: str, name: str, first: str | None = None, last: str | None = None) -> list[str]:
    """The lines of a definition without docstrings; with `first` and `last`, those from one to the other."""
    node = definition(source, name)
    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    docstrings: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            text = inner.body[0]
            docstrings |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    assert node.end_lineno is not None
    lines = source.splitlines()
    shown = [lines[n - 1] for n in range(begin, node.end_lineno + 1) if n not in docstrings]
    if first is not None and last is not None:
        start = _position(shown, first, 0, name)
        shown = shown[start : _position(shown, last, start, name) + 1]
    return dedent("\n".join(shown)).splitlines()


def imports_of(source: str, code: str) -> list[str]:
    """The imports of a source that some of its code needs."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each for each in node.names if (each.asname or each.name).partition(".")[0] in used]
            if names:
                module = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                found.append(f"{module}import {', '.join(ast.unparse(each) for each in names)}")
    return [*found, "", ""] if found else []


def _position(lines: list[str], words: str, after: int, name: str) -> int:
    for index in range(after, len(lines)):
        if lines[index].strip().startswith(words):
            return index
    raise SystemExit(f"error: no line of {name} begins with {words!r} any more")


def filled(page: str) -> str:
    """The text of a page with its blocks as the sources are."""

    def fill(match: re.Match[str]) -> str:
        source = (ROOT / match["file"]).read_text(encoding="utf-8")
        code = "\n".join(code_of(source, match["name"], match["first"], match["last"]))
        if match["file"].startswith("examples/"):  # to be copied
            code = "\n".join([*imports_of(source, code), code])
        marker = match[0].partition("\n")[0]
        return f'{marker}\n```python title="{match["file"]}"\n{code}\n```\n'

    return _BLOCK.sub(fill, page)


def pages() -> dict[Path, str]:
    """The text of each page of the docs, with its blocks filled."""
    return {page: filled(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")}


if __name__ == "__main__":
    sys.exit(main(pages, "generate_code.py", __doc__))
