"""The command line of the scripts beside it that make a page of the docs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(page: Path, render: Callable[[], str], script: str, doc: str) -> int:
    """Writes the page, or with --check says whether it is what would be written."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if page.read_text(encoding="utf-8") != render():
            print(f"{page.name} is out of date: run python docs/{script}", file=sys.stderr)
            return 1
        return 0
    page.write_text(render(), encoding="utf-8")
    return 0
