"""The README.md of an export: what the weights are, where they come from, and how to load them.

It can be published: it contains no path of this machine, and no value from the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

_PATH = re.compile(r"(?<![^\s='\",:;(\[{])(?:file://)?(?:~?/(?!/)|[A-Za-z]:[\\/])[^\s'\",;)\]}]*")
_SECRET = re.compile(r"(?:^|_)(?:token|secret|password|passwd|api_?key|credential)s?\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """The facts of an export's model card. `render` shortens absolute paths in texts to their last part.

    Attributes:
        title: title of the page.
        summary: a sentence or two below it.
        library: library that loads the weights.
        licence: licence of the weights.
        base_model: hub name of the model that training started from.
        tags: tags for model hubs.
        loading: Python that loads the weights.
        facts: rows of name and value.
        settings: sections of the config that was trained with.
        data: a row for each dataset (split, type, rows, checksums of its files).
        metrics: metrics on held-out data.
        made_with: rows of name and version.
    """

    title: str
    summary: str
    library: str = ""
    licence: str | None = None
    base_model: str | None = None
    tags: Sequence[str] = ()
    loading: str = ""
    facts: Sequence[tuple[str, str]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    data: Sequence[tuple[str, str, str, str]] = ()
    metrics: Mapping[str, object] = field(default_factory=dict)
    made_with: Sequence[tuple[str, str]] = ()


def render(card: Card) -> str:
    """The text of an export's model card: Markdown after a YAML front matter, as model hubs read it."""
    front = {
        "library_name": card.library,
        "license": card.licence.lower() if card.licence else None,
        "base_model": card.base_model,
        "tags": list(dict.fromkeys(card.tags)),
    }
    lines = ["---", _yaml({key: value for key, value in front.items() if value}), "---", ""]
    lines += [f"# {_line(card.title)}", "", _public(card.summary), ""]
    figures = [(name, _figure(value)) for name, value in card.metrics.items()]
    sections = {
        "Load": ["````python", _public(card.loading).strip(), "````"] if card.loading else [],
        "Facts": _table(("", ""), card.facts),
        "Held-out data": _table(("figure", "value"), figures) if figures else [],
        "Data": _table(("dataset", "type", "rows", "sha256 of its files"), card.data) if card.data else [],
        "Config": ["````yaml", _yaml(_publishable(card.settings)), "````"] if card.settings else [],
        "Made with": _table(("", "version"), card.made_with) if card.made_with else [],
    }
    for title, body in sections.items():
        lines += [f"## {title}", "", *body, ""] if body else []
    return "\n".join(lines).rstrip() + "\n"


def _publishable(value: object, key: str = "") -> object:
    """Plain values without paths of this machine and without values of keys named like secrets."""
    if isinstance(value, Mapping):
        return {name: _publishable(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_publishable(item, key) for item in value]
    if isinstance(value, str):
        if _SECRET.search(key) and not value.startswith("${"):
            return "(withheld)"
        return _public(value)
    return value


def _public(text: str) -> str:
    """Replaces absolute paths by `.../` and their last part."""
    return _PATH.sub(lambda found: ".../" + re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], text)


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
    return text.rstrip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_line(_public(str(cell))).replace("|", "\\|") for cell in row] for row in rows]
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _line(text: str) -> str:
    return " ".join(text.split())


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
