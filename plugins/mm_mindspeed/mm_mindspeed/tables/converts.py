"""Conversions of values, and rows of several keys, that the tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mm_core.interchange import Drop, Key, Row


def drops(names: str, why: str) -> tuple[Drop, ...]:
    """A row for each name, which does nothing here for the same reason."""
    return tuple(Drop(name, why) for name in names.split())


def same(names: str, ours: str) -> tuple[Key, ...]:
    """A row for each name, which a section of ours has too."""
    return tuple(Key(name, f"{ours}.{name}") for name in names.split())


def under(prefix: str, *rows: Row) -> tuple[Row, ...]:
    """Rows about keys below a prefix."""
    return tuple(replace(row, theirs=prefix + row.theirs) for row in rows)


def always(value: Any) -> Callable[[Any], Any]:
    """A conversion to one value."""
    return lambda _: value


def one_of(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A conversion of known values; another is an error that lists them."""

    def convert(value: Any) -> Any:
        if value not in known:
            raise ValueError(f"{value!r} has no counterpart here; known: {', '.join(map(str, known))}")
        return known[value]

    return convert


dtype = one_of(
    {
        **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"},
        **{"fp32": "fp32", "float32": "fp32", "float": "fp32", "tf32": "fp32", None: None},
    }
)


def norm(value: Any) -> float | None:
    """The largest norm of gradients; 0 is off."""
    return float(value) or None


def path(value: Any) -> str:
    """A path; one with spaces that was not quoted comes as several words."""
    words = value if isinstance(value, list) else [value]
    return " ".join(str(word) for word in words).rstrip("/")


def sharding(value: Any) -> int | str:
    """Ranks of a shard group."""
    return value if value == "auto" else int(value)
