"""Reads a DeepSpeed JSON file (hjson); its keys know the file and line where they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# A quoted string, which is kept, or a comment.
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|/\*.*?\*/|(?://|#)[^\n]*', re.DOTALL)


class Key(str):
    """A key of the file, equal to its text; `where` is its `file:line`."""

    where: str


yaml.SafeDumper.add_representer(Key, yaml.SafeDumper.represent_str)


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, in their order; a key may be there twice."""


def read_json(file: str) -> dict[str, Any]:
    """The keys of a DeepSpeed JSON file.

    Raises:
        ValueError: it cannot be read, or is not such a file.
    """
    import hjson

    if Path(file).exists() and not Path(file).is_file():
        raise ValueError(f"config {file} is not a file")  # a pipe would wait for a writer
    try:
        text = Path(file).read_text("utf-8")
        found = hjson.loads(text, object_pairs_hook=_Pairs)
    except OSError as error:
        what = f"config {file} cannot be read: {error.strerror}"
        raise ValueError(f"{what}; a relative path is from where the command starts") from None
    except ValueError as error:
        raise ValueError(f"config {file} is not a DeepSpeed JSON file: {error}") from None
    if not isinstance(found, _Pairs):
        raise ValueError(f"config {file} is not a DeepSpeed JSON file: it has no keys")
    return _Placed(file, text).mapping(found)


def place_of(settings: Mapping[str, Any], path: str = "") -> str:
    """The `file:line` of a dotted key, or of the innermost key above it; "" for keys of a YAML.

    Without a path, the file.
    """
    where, found = "", settings
    for name in path.split("."):
        key = next((key for key in found if key == name), None) if isinstance(found, Mapping) else None
        if key is None:
            break
        where, found = key.where if isinstance(key, Key) else "", found[key]
    if where:
        return where
    return next((key.where.rpartition(":")[0] for key in settings if isinstance(key, Key)), "")


def placed(settings: Mapping[str, Any], fault: str) -> str:
    """A fault that starts with a dotted key, after the place of that key."""
    where = place_of(settings, fault.split(maxsplit=1)[0])
    return f"config {where}: {fault}" if where else f"settings {fault}"


class _Placed:
    """Finds the lines of keys: in a file, they come in the order in which reading finds them."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.at = file, 0
        self.text = _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)

    def mapping(self, pairs: _Pairs) -> dict[str, Any]:
        found: dict[str, Any] = {}
        places: dict[str, Key] = {}
        for name, value in pairs:
            key = self.key(name)
            if name in places:
                also = places[name].where.rpartition(":")[2]
                raise ValueError(f"config {key.where}: the key {name!r} appears twice, also on line {also}")
            places[name], found[key] = key, self.value(value)
        return found

    def value(self, value: Any) -> Any:
        if isinstance(value, _Pairs):
            return self.mapping(value)
        return [self.value(item) for item in value] if isinstance(value, list) else value

    def key(self, name: str) -> Key:
        start = self.at
        if match := re.compile(rf'(?<![\w.])(["\']?){re.escape(name)}\1\s*:').search(self.text, self.at):
            start, self.at = match.start(), match.end()
        key = Key(name)
        key.where = f"{self.file}:{self.text.count(chr(10), 0, start) + 1}"
        return key
