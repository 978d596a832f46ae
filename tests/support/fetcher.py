"""A process that fetches the names in its arguments, as a command does, and prints what it then reads.

`python fetcher.py NAME...`: prints JSON, the path and files of each; or an error, with exit code 1. A name
that begins with `small:` is fetched without weights.
"""

from __future__ import annotations

import json
import sys

from mm_core.errors import MMError
from mm_core.fetching import fetch
from mm_core.hub import HubName
from mm_core.hub_files import Use


def main(words: list[str]) -> int:
    """Fetches names; the exit code of the process."""
    uses = [
        Use(HubName.of(word.removeprefix("small:")), weights=not word.startswith("small:")) for word in words
    ]
    try:
        fetch(uses)
    except MMError as fault:
        print(fault.render())
        return 1
    found = {}
    for use in uses:
        path = use.name.path
        held = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        found[str(use.name)] = {
            "path": str(path),
            "commit": use.name.commit,
            "files": [p.relative_to(path).as_posix() for p in held if p != path] or path.name,
        }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
