"""Makes docs/api/: a page for each room that offers names to plugins, from the `__all__` of each.

The pages name the objects; mkdocstrings fills in signatures and docstrings when the site is built.

python docs/generate_api.py            writes the pages
python docs/generate_api.py --check    exits 1 when the pages are not what would be written
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = DOCS / "api"
SCRIPT = "<!-- Made by docs/generate_api.py from `__all__` of the rooms: do not edit. -->"

_PAGE = """\
# `{room}`

{script}

::: {room}
    options:
      members: [{members}]

## Where to go next

- [All names](index.md): the other rooms that offer names.
- [Hooks](../hooks.md): the kinds of component that use these names.
- [Plugins](../plugins.md): how a plugin is packaged.
"""

_INDEX_HEAD = """\
# API

{script}

A plugin imports only names listed here, from the room that lists them: `from mm_core.data import PyAVReader`.
Everything else in `mm_core` may change without notice.
[Architecture](../architecture.md) describes the rooms.
"""

_INDEX_TAIL = """
## Where to go next

- [Hooks](../hooks.md): every kind of component, with the signature of its target.
- [Write a DiT](../writing-a-dit.md): these names at work.
- [Architecture](../architecture.md): the rooms behind the names.
"""


def offered(file: Path) -> list[str]:
    """The names in `__all__` of a module, in its order; none where it has no such list."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def rooms() -> dict[str, list[str]]:
    """Dotted name of each package that offers names -> the names."""
    found = {}
    for file in sorted((ROOT / "mm_core").rglob("__init__.py"), key=lambda path: path.parent):
        if names := [name for name in offered(file) if not name.startswith("__")]:
            room = ".".join(file.parent.relative_to(ROOT).parts)
            found[room] = names
    return found


def pages() -> dict[str, str]:
    """File name -> text of each page."""
    found = {}
    index = _INDEX_HEAD.format(script=SCRIPT)
    for room, names in rooms().items():
        index += f"\n## [`{room}`]({room}.md)\n\n"
        index += ",\n".join(f"[`{name}`]({room}.md#{room}.{name})" for name in names) + "\n"
        found[f"{room}.md"] = _PAGE.format(room=room, members=", ".join(names), script=SCRIPT)
    return {"index.md": index + _INDEX_TAIL, **found}


def main() -> int:
    """Writes the pages, or with --check reports whether they are what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if parser.parse_args().check:
        stale = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
        if stale:
            print(
                f"api/{', api/'.join(stale)}: out of date: run python docs/generate_api.py", file=sys.stderr
            )
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
