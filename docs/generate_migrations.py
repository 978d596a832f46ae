"""Writes a page for each tool that `mm migrate` reads, from the tables of its migration.

python docs/generate_migrations.py            writes the pages
python docs/generate_migrations.py --check    exits 1 when a page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from generated_page import DOCS, main

from mm_core.interchange import NOTHING, Default, Differs, Drop, Key, Row

TOOLS: Mapping[str, str] = {
    "coming-from-mindspeed-mm.md": "mm_mindspeed.tables",
    "coming-from-other-trainers.md": "mm_trainers.tables",
}
"""Page -> the module with its `HEAD` and `TABLES`."""


def render(module: str) -> str:
    """The page as Markdown: `HEAD` of the module, a section for each of its `TABLES`, and the links."""
    source = import_module(module)
    parts = [source.HEAD.replace("<!-- made -->", _MADE)]
    for title, rows in source.TABLES.items():
        lines = ["| key | here | |", "|---|---|---|", *_lines(rows)]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join([*parts, _LINKS])


_MADE = "<!-- Made by docs/generate_migrations.py from the tables of the migration: do not edit. -->"
_LINKS = """\
## Where to go next

- [Coming from another tool](migrate.md): what `mm migrate` prints, and how to read it.
- [Config](config.md): the keys of a YAML here.
- [Weights in and out](weights.md): what else a run can begin with.
"""


def _lines(rows: Iterable[Row]) -> list[str]:
    """A line for each key, and one for all keys that are left out for the same reason."""
    lines: list[str] = []
    left: dict[tuple[type[Row], str], list[str]] = {}
    for row in rows:
        name = f"`{row.theirs}`"
        if row.only:
            values = ", ".join(f"`{_plain(value)}`" for value in row.only)
            name += " off" if row.only == NOTHING else f" = {values}"
        if row.given:
            name += f" where `{row.given}`"
        if isinstance(row, Key):
            lines.append(_line(name, f"`{row.ours}`" if row.ours else "", row.note))
            if row.absent is not ...:
                value = row.convert(row.absent, *row.of.values()) if row.convert else row.absent
                lines.append(_line(f"{name} absent", f"`{row.ours}: {_plain(value)}`", ""))
        elif isinstance(row, Default):
            lines.append(_line(f"{name} absent", f"`{row.ours}: {_plain(row.value)}`", row.note))
        elif isinstance(row, (Drop, Differs)):
            left.setdefault((type(row), row.why), []).append(name)
    for (kind, why), names in left.items():
        lines.append(_line(", ".join(names), "nothing" if kind is Drop else "**no counterpart**", why))
    return lines


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(value: object) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else f"{value}"


def pages() -> dict[Path, str]:
    return {DOCS / page: render(module) for page, module in TOOLS.items()}


if __name__ == "__main__":
    sys.exit(main(pages, "generate_migrations.py", __doc__))
