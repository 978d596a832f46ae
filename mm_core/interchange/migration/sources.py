"""Reads the files of other tools as mappings that know the line of every value: JSON, YAML, TOML."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from mm_core.config.yaml_nodes import read_foreign
from mm_core.errors import ConfigError, first_line
from mm_core.files import read_plain
from mm_core.schema.nodes import Node, from_python

_HEADER = re.compile(r"\s*\[\[?\s*([^\]\[]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*["']?([\w.-]+)["']?\s*=""")


def read_source(path: Path) -> Node:
    """Reads a JSON, YAML or TOML file, by the end of its name.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        root = _toml(path) if path.suffix == ".toml" else read_foreign(path)
    except ConfigError:
        if path.suffix == ".json":
            _check_json(path)
        raise
    if not isinstance(root.value, dict):
        raise ConfigError("the file holds no mapping", where=str(path), accepted="keys with values")
    return root


def _check_json(path: Path) -> None:
    """Raises ConfigError for text that is not JSON, with its own line and words rather than those of YAML."""
    try:
        json.loads(read_plain(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"this is not JSON: {error.msg}", where=f"{path}:{error.lineno}") from None
    except (OSError, ValueError):
        return


def _toml(path: Path) -> Node:
    try:
        text = read_plain(path).decode("utf-8")
        return _placed(from_python(tomllib.loads(text), str(path)), _lines(text))
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:  # also text that is not UTF-8
        raise ConfigError(f"this is not TOML: {first_line(error)}", where=str(path)) from None


def _lines(text: str) -> dict[str, int]:
    """The line of each key of a TOML, by its path; an array of tables counts its items."""
    found: dict[str, int] = {}
    above, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            above = f"{header[1]}."
            if line.lstrip().startswith("[["):
                counts[header[1]] = counts.get(header[1], -1) + 1
            for name, count in counts.items():
                above = re.sub(rf"^{re.escape(name)}\.", f"{name}.{count}.", above)
        elif key := _KEY.match(line):
            found.setdefault(f"{above}{key[1]}", number)
    return found


def _placed(node: Node, lines: dict[str, int]) -> Node:
    line = lines.get(node.path)
    placed = Node(node.value, f"{node.where}:{line}", node.path) if line else node
    return placed.mapped(lambda child: _placed(child, lines))
