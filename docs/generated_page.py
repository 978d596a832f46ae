"""The command line of the scripts beside it that make pages of the docs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def main(render: Callable[[], Mapping[Path, str]], script: str, doc: str, made: Iterable[Path] = ()) -> int:
    """Writes the pages that differ, or with --check reports whether they are what would be written.

    Args:
        render: returns the text of each page.
        script: name of the script, for the report.
        doc: docstring of the script.
        made: pages that the script has made before; one that it does not make any more is removed.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, wanted = parser.parse_args().check, render()
    there = {page: page.read_text(encoding="utf-8") for page in {*wanted, *made} if page.is_file()}
    stale = sorted(page for page in {*wanted, *there} if wanted.get(page) != there.get(page))
    if check:
        names = ", ".join(page.relative_to(DOCS.parent).as_posix() for page in stale)
        if stale:
            print(f"{names}: out of date: run python docs/{script}", file=sys.stderr)
        return int(bool(stale))
    for page in stale:
        if page in wanted:
            page.parent.mkdir(exist_ok=True)
            page.write_text(wanted[page], encoding="utf-8")
        else:
            page.unlink()
    return 0
