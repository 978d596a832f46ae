"""YAML files as trees that remember the line of every key and value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mm_core.errors import ConfigError, MMError, did_you_mean
from mm_core.plugin.checking import Node

MAX_NODES = 100_000
"""Values in a file after its aliases are expanded: a few lines of aliases can stand for billions."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-5 is a number and dates stay texts, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(
    r"[-+]?(?:(?:\d[\d_]*)?\.\d+(?:[eE][-+]?\d+)?|\d[\d_]*\.(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_file(path: Path, faults: list[MMError]) -> Node:
    """The tree of a file. What stops the reading is raised, what does not is added to `faults`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [str(p) for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError(
            "there is no such file",
            where=str(path),
            accepted=", ".join(near[:8]) or None,
            hint=did_you_mean(str(path), near),
        ) from None
    except IsADirectoryError:
        raise ConfigError("this is a folder, not a YAML file", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not UTF-8 text (byte {error.start})", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"the file can not be read: {error.strerror}", where=str(path)) from None
    return read_text(text, str(path), faults)


def read_text(text: str, name: str, faults: list[MMError]) -> Node:
    """The tree of a YAML text; `name` stands for it in places."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(
                "the file is empty", where=name, accepted="a mapping with run, task, data, train"
            )
        return _Reader(loader, name, faults).node(root, "")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or str(error)
        hint = "put module patterns with braces in quotes" if "{" in _line(text, mark) else None
        raise ConfigError(f"this is not YAML: {problem}", where=where, hint=hint) from None
    finally:
        loader.dispose()


def _line(text: str, mark: Any) -> str:
    lines = text.splitlines()
    return lines[mark.line] if mark is not None and mark.line < len(lines) else ""


class _Reader:
    def __init__(self, loader: _Loader, name: str, faults: list[MMError]) -> None:
        self.loader, self.name, self.faults = loader, name, faults
        self.count = 0
        self.open: set[int] = set()

    def node(self, source: yaml.Node, path: str, key_where: str = "") -> Node:
        where = self._where(source)
        self.count += 1
        if self.count > MAX_NODES or id(source) in self.open:
            raise ConfigError(f"aliases expand to more than {MAX_NODES:,} values", where=where)
        self.open.add(id(source))
        value: Any
        if isinstance(source, yaml.MappingNode):
            value = self._mapping(source, path)
        elif isinstance(source, yaml.SequenceNode):
            value = [self.node(child, f"{path}.{index}") for index, child in enumerate(source.value)]
        else:
            value = self._scalar(source, where)
        self.open.discard(id(source))
        return Node(value, where, path, key_where)

    def _where(self, source: yaml.Node) -> str:
        return f"{self.name}:{source.start_mark.line + 1}"

    def _scalar(self, source: yaml.Node, where: str) -> Any:
        try:
            return self.loader.construct_object(source)  # type: ignore[no-untyped-call]
        except (yaml.YAMLError, ValueError) as error:
            self.faults.append(ConfigError(f"{source.value!r} can not be read: {error}", where=where))
            return None

    def _mapping(self, source: yaml.MappingNode, path: str) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, child in source.value:
            where = self._where(key)
            if key.tag == "tag:yaml.org,2002:merge":
                parts = child.value if isinstance(child, yaml.SequenceNode) else [child]
                for part in parts:
                    inner = self.node(part, path)
                    if isinstance(inner.value, dict):
                        merged = {**inner.value, **merged}
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (
                "tag:yaml.org,2002:str",
                "tag:yaml.org,2002:int",
            ):
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self.faults.append(
                    ConfigError(f"the key {shown} is not a text", where=where, hint="put it in quotes")
                )
                continue
            name = key.value
            if name in own:
                self.faults.append(
                    ConfigError(
                        f"the key {name!r} stands twice, first at {own[name].key_where}",
                        where=f"{where}: {path}" if path else where,
                    )
                )
                continue
            own[name] = self.node(child, f"{path}.{name}" if path else name, where)
        return {**merged, **own}
