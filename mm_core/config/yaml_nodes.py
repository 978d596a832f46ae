"""YAML files as trees that remember the line of every key and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mm_core.errors import ConfigError, MMError, did_you_mean
from mm_core.plugin.nodes import FAILED, Node

MAX_NODES = 100_000
"""Values in a file after its aliases are expanded: a few lines of aliases can stand for billions."""
MAX_DEPTH = 100
"""Mappings and lists within each other."""

_TAG = "tag:yaml.org,2002:"
FLOAT = re.compile(
    r"""(?:[-+]?(?:(?:\d[\d_]*)?\.\d+(?:[eE][-+]?\d+)?|\d[\d_]*\.(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z""",
    re.VERBOSE,
)
_INT = re.compile(r"(?:[-+]?(?:0|[1-9][\d_]*)|0x[\da-fA-F]+)\Z")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, with the numbers of YAML 1.2: 1e-5 is one, and 0123 (octal), 1:30
    (90) and dates are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, p) for tag, p in rules if tag.removeprefix(_TAG) not in ("timestamp", "float", "int", "value")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))


def read_file(path: Path, faults: list[MMError]) -> Node:
    """The tree of a file. What stops the reading is raised, what does not is added to `faults`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _not_found(path) from None
    except IsADirectoryError:
        raise ConfigError(
            "this is a folder, not a YAML file",
            where=str(path),
            accepted=", ".join(map(str, _yaml_files(path)[:8])) or None,
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not UTF-8 text (byte {error.start})", where=str(path)) from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"the file can not be read: {cause}", where=str(path)) from None
    tree: Node = _parsed(text, str(path), lambda loader: _tree(loader, str(path), faults))
    return tree


def read_quoted(text: str) -> str | None:
    """What a text in YAML quotes stands for; None when it is no such text."""
    try:
        node = _parsed(text, "", lambda loader: loader.get_single_node())
    except ConfigError:
        return None
    return node.value if isinstance(node, yaml.ScalarNode) else None


def read_plain(text: str) -> Any:
    """A scalar without quotes: 3 is an integer, true a boolean, null nothing, anything else a text."""
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        node = yaml.ScalarNode(tag, text)
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return text
    finally:
        loader.dispose()


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.y*ml")) if folder.is_dir() else []


def _not_found(path: Path) -> ConfigError:
    if not path.parent.is_dir():
        return ConfigError(
            "there is no such file", where=str(path), hint=f"the folder {path.parent} does not exist"
        )
    near = [str(other) for other in _yaml_files(path.parent)]
    return ConfigError(
        "there is no such file",
        where=str(path),
        accepted=", ".join(near[:8]) or None,
        hint=did_you_mean(str(path), near),
    )


def _parsed(text: str, name: str, read: Callable[[_Loader], Any]) -> Any:
    """`read` of a loader over the text; what YAML refuses becomes a sentence with its line."""
    try:
        loader = _Loader(text)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:  # a control character; it has a position and no line
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"this is not YAML: the character U+{ord(text[error.position]):04X} is not allowed",
            where=f"{name}:{line}",
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        what = ", ".join(part for part in (error.context, error.problem) if part)
        lines = text.splitlines()
        braces = mark is not None and mark.line < len(lines) and "{" in lines[mark.line]
        hint = "put module patterns with braces in quotes" if braces else None
        raise ConfigError(f"this is not YAML: {what}", where=where, hint=hint) from None
    except RecursionError:
        raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", where=name) from None


def _tree(loader: _Loader, name: str, faults: list[MMError]) -> Node:
    root = loader.get_single_node()
    if root is None:
        raise ConfigError(
            "the file is empty", where=name, accepted="a mapping with run, task, data, train, ..."
        )
    return _Reader(loader, name, faults).node(root, "")


class _Reader:
    def __init__(self, loader: _Loader, name: str, faults: list[MMError]) -> None:
        self.loader, self.name, self.faults = loader, name, faults
        self.count = 0
        self.open: set[int] = set()

    def node(self, source: yaml.Node, path: str, key_where: str = "") -> Node:
        where = self._where(source)
        self.count += 1
        if id(source) in self.open:
            raise ConfigError("an alias stands for something that contains the alias", where=where)
        if self.count > MAX_NODES:
            raise ConfigError(f"aliases expand to more than {MAX_NODES:,} values", where=where)
        if len(self.open) >= MAX_DEPTH:
            raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", where=where)
        self.open.add(id(source))
        value: Any
        if not isinstance(source, yaml.ScalarNode) and source.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            value = self._fault(where, path, f"the tag {source.tag.removeprefix(_TAG)!r} is not supported")
        elif isinstance(source, yaml.MappingNode):
            value = self._mapping(source, path)
        elif isinstance(source, yaml.ScalarNode):
            value = self._scalar(source, where, path)
        else:
            items = enumerate(source.value)
            value = [self.node(child, f"{path}.{index}" if path else str(index)) for index, child in items]
        self.open.discard(id(source))
        return Node(value, where, path, key_where)

    def _where(self, source: yaml.Node) -> str:
        return f"{self.name}:{source.start_mark.line + 1}"

    def _fault(self, where: str, path: str, what: str, hint: str | None = None) -> Any:
        self.faults.append(ConfigError(what, where=f"{where}: {path}" if path else where, hint=hint))
        return FAILED

    def _scalar(self, source: yaml.ScalarNode, where: str, path: str) -> Any:
        try:
            value = self.loader.construct_object(source)
        except (yaml.YAMLError, ValueError) as error:
            cause = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            return self._fault(where, path, f"{source.value!r} can not be read: {cause}")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        tag = source.tag.removeprefix(_TAG)
        return self._fault(where, path, f"the tag {tag!r} is not supported")

    def _mapping(self, source: yaml.MappingNode, path: str) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, child in source.value:
            where = self._where(key)
            if key.tag == f"{_TAG}merge":
                merged = {**self._merged(child, path), **merged}
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (f"{_TAG}str", f"{_TAG}int"):
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self._fault(where, path, f"the key {shown} is not a text", hint="put it in quotes")
                continue
            name = key.value
            if name in own:
                self._fault(where, path, f"the key {name!r} stands twice, first at {own[name].key_where}")
                continue
            own[name] = self.node(child, f"{path}.{name}" if path else name, where)
        return {**merged, **own}

    def _merged(self, source: yaml.Node, path: str) -> dict[str, Node]:
        """The mapping, or the list of mappings, behind `<<:`. Earlier ones come first."""
        merged: dict[str, Node] = {}
        for part in source.value if isinstance(source, yaml.SequenceNode) else [source]:
            inner = self.node(part, path)
            if isinstance(inner.value, dict):
                merged = {**inner.value, **merged}
            elif inner.value is not FAILED:
                self._fault(inner.where, path, "'<<' takes a mapping, or a list of mappings")
        return merged
