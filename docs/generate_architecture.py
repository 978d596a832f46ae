"""Writes docs/architecture.md from the rooms' docstrings and the layers in pyproject.toml.

python docs/generate_architecture.py            writes the page
python docs/generate_architecture.py --check    exits 1 when the page is not what would be written
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

from generated_page import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("architecture.md")

_HEAD = """\
# Architecture

<!-- Made by docs/generate_architecture.py from the rooms' docstrings and pyproject.toml: do not edit. -->

Each folder at the top of `mm_core` is a room with one subject. A room imports only from layers below its own;
rooms of one layer do not import each other. `make lint` checks this, and
[decision 002](decisions/002-rooms.md) gives the reasons.

## How a run flows

![How a run flows through the rooms](assets/flow.svg)

`cli` reads the command, `config` the YAML, `plugin` finds what it names; `plan` computes sizes; `training`
puts the run together (`loading` brings the weights, `engines` spread them) and steps: `data` reads, `tasks`
compute, `optim` updates, `telemetry` measures, `evaluation` judges, `checkpoint` saves. `inference` and
`interchange` work on the result. [The loop, annotated](loop.md) shows one step with its code.

## The rooms

From the top layer to the bottom:

| layer | room | subject |
|---|---|---|
"""

_DECISIONS = "\n## Decisions\n\nWhy some things are as they are:\n\n"

_TAIL = """
## Where to go next

- [The loop, annotated](loop.md): one training step, with its code.
- [Plugins](plugins.md): where components come from.
- [Hooks](hooks.md): every kind of component.
"""


def sentence_of(module: str) -> str:
    """The first line of a room's docstring."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]


def decisions() -> list[str]:
    """A line of Markdown for each decision, with the title of its page."""
    pages = sorted(PAGE.with_name("decisions").glob("*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    return [
        f"- [{title.lstrip('# 0123456789.:')}](decisions/{page.name})\n"
        for page, title in zip(pages, titles, strict=True)
    ]


def render() -> str:
    """The page as Markdown."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [each["layers"] for each in contracts["contracts"] if each["type"] == "layers"]
    rows = [
        f"| {number} | `{room.removeprefix('mm_core.')}` | {sentence_of(room)} |\n"
        for number, layer in enumerate(layers, 1)
        for room in (name.strip(" ()") for name in layer.split("|"))
    ]
    return _HEAD + "".join(rows) + _DECISIONS + "".join(decisions()) + _TAIL


if __name__ == "__main__":
    sys.exit(main(lambda: {PAGE: render()}, "generate_architecture.py", __doc__))
