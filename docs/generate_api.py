"""Makes docs/api/: a page for each room that offers names to plugins, from the `__all__` of each.

The pages name the objects; mkdocstrings fills in signatures and docstrings when the site is built.

python docs/generate_api.py            writes the pages
python docs/generate_api.py --check    exits 1 when the pages are not what would be written
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from generated_page import DOCS, main

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


def pages() -> dict[Path, str]:
    """The text of each page."""
    found = {}
    index = _INDEX_HEAD.format(script=SCRIPT)
    for room, names in rooms().items():
        index += f"\n## [`{room}`]({room}.md)\n\n"
        index += ",\n".join(f"[`{name}`]({room}.md#{room}.{name})" for name in names) + "\n"
        found[FOLDER / f"{room}.md"] = _PAGE.format(room=room, members=", ".join(names), script=SCRIPT)
    return {FOLDER / "index.md": index + _INDEX_TAIL, **found}


if __name__ == "__main__":
    sys.exit(main(pages, "generate_api.py", __doc__, FOLDER.glob("*.md")))
