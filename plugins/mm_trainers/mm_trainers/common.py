"""What the migrations share: names of models, conversions of values, rows for what is off by default."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_core.errors import MMError
from mm_core.interchange.migration import Differs, Drop, Left, Migrated, Row, place_of, read_source
from mm_core.schema.nodes import Node, to_python

FASTER = "it changes speed or memory, not what is computed"
SAMPLING = "of samples during training alone"
LOGGING = "of logs and displays alone"
EXPORT = "of the files that are written: `mm export --dtype, --push`"
OFF = "off here too"
CACHE = "latents and states of captions are encoded once, into data.cache"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class NoOptions:
    """Config of a migration: it has no keys."""


def one_of(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A conversion of known values; another is an error that lists them."""

    def convert(value: Any) -> Any:
        if value not in known:
            raise ValueError(f"{value!r} has no counterpart here; known: {', '.join(map(str, known))}")
        return known[value]

    return convert


def norm(value: Any) -> float | None:
    """The largest norm of gradients; 0 is off."""
    return float(value) or None


def words(value: Any) -> list[str]:
    """A list of words, from one or from a text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


DTYPE = one_of(
    {
        **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"},
        **{"fp32": "fp32", "float32": "fp32", "float": "fp32", "no": "fp32"},
    }
)


def off(prefix: str, defaults: Mapping[str, Any], why: str) -> tuple[Row, ...]:
    """Rows for keys that do nothing at a value, and have no counterpart at any other."""
    return tuple(
        row
        for name, value in defaults.items()
        for row in (
            Drop(f"{prefix}{name}", OFF, only=value if isinstance(value, tuple) else (value, None)),
            Differs(f"{prefix}{name}", why),
        )
    )


def drops(prefix: str, names: Sequence[str], why: str) -> tuple[Row, ...]:
    """Rows for keys that do nothing here."""
    return tuple(Drop(f"{prefix}{name}", why) for name in names)


def model_name(value: Any) -> str:
    """A model's folder as its path; a name on the hub with `hub:` before it."""
    name = str(value).rstrip("/")
    return f"hub:{name}" if _HUB.fullmatch(name) and not Path(name).exists() else name


def value_at(node: Node, path: str, default: Any = None) -> Any:
    """The plain value at a dotted path; a null counts as absent."""
    found = at(node, path)
    value = None if found is None else to_python(found)
    return default if value is None else value


def at(node: Node, path: str) -> Node | None:
    """The node at a dotted path, of mappings and lists."""
    found: Node | None = node
    for key in path.split("."):
        if found is None:
            return None
        if isinstance(found.value, list):
            found = found.value[int(key)] if key.isdigit() and int(key) < len(found.value) else None
        else:
            found = found.at(key)
    return found


def place(node: Node, path: str) -> str:
    """Where a value was written; for one that is absent, that it is the tool's default."""
    found = at(node, path)
    return place_of(found) if found is not None else f"default of the tool for {path}"


def rooted(node: Node, start: str) -> Node:
    """A tree whose paths begin below `start`."""
    return replace(node, path=node.path.removeprefix(start)).mapped(lambda child: rooted(child, start))


def differ(run: Migrated, node: Node, path: str, why: str) -> None:
    """Lists what has no counterpart."""
    run.differs.append(Left(place(node, path), path, value_at(node, path, ""), why))


def take_off(run: Migrated, key: str, why: str) -> None:
    """Moves a line of ours to what does nothing here."""
    if line := run.lines.pop(key, None):
        run.dropped.append(Left(line.place, key, line.value, why))


def files_of(
    paths: Sequence[Path], suffixes: tuple[str, ...], is_one: Callable[[Node], bool]
) -> Iterator[Node]:
    """The files, also in folders, whose keys are of a tool; raises nothing."""
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in inside:
            if file.suffix not in suffixes or not file.is_file():
                continue
            try:
                root = read_source(file)
            except MMError:
                continue
            if is_one(root):
                yield root
