"""Rows of the tables: keys with defaults, keys that are off, and reasons that several tools share."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import NOTHING, Differs, Drop, Key, Row

FASTER = "it changes speed or memory, not what is computed"
SAMPLING = "of samples during training alone"
LOGGING = "of logs and displays alone"
EXPORT = "of the files that are written: `mm export --dtype, --push`"
OFF = "off here too"
CACHE = "latents and states of captions are encoded once, into data.cache"
RATE = "0 is off, which is null here"
SEED = "other random numbers than theirs"

Rows = tuple[Row, ...]


def takes(prefix: str, ours: str, names: str, convert: Any = None, **more: Any) -> Rows:
    """Rows for keys that become ours, of which a text has the names: `theirs=ours`, or one for both."""
    pairs = [name.partition("=") for name in names.split()]
    return tuple(Key(f"{prefix}{a}", f"{ours}{b or a}", convert, **more) for a, _, b in pairs)


def reads(prefix: str, names: str, note: str) -> Rows:
    """Rows for keys that the migration itself reads, of which a text has the names."""
    return tuple(Key(f"{prefix}{name}", note=note) for name in names.split())


def off(prefix: str, why: str, names: str = "", **defaults: Any) -> Rows:
    """Rows for keys that have no counterpart unless they are off, or have one of some values."""
    values = dict.fromkeys(names.split(), NOTHING)
    values |= {name: value if isinstance(value, tuple) else (value, None) for name, value in defaults.items()}
    return tuple(
        row
        for name, only in values.items()
        for row in (Drop(f"{prefix}{name}", OFF, only=only), Differs(f"{prefix}{name}", why))
    )


def drops(prefix: str, names: str, why: str) -> Rows:
    """Rows for keys that do nothing here, of which a text has the names."""
    return tuple(Drop(f"{prefix}{name}", why) for name in names.split())
