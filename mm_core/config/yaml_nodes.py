"""YAML files as trees that remember the line of every key and value."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mm_core.errors import ConfigError, MMError, did_you_mean, first_line
from mm_core.schema.nodes import FAILED, Node, unwritable

MAX_BYTES = 256 * 1024
"""Most bytes in all files of a config: a run needs a few thousand, and PyYAML takes seconds for this many."""
MAX_NODES = 100_000
"""Most values in all files of a config after aliases are expanded: a few lines can expand to billions."""
MAX_DEPTH = 100
"""Most levels of nested mappings and lists."""
MAX_PATH = 1_000
"""Most characters in a key path."""
MAX_BITS = 1024
"""Most bits in an integer."""
_UNTAG = "remove the tag (!...), and write the value as plain YAML"
_QUOTE = "put it in quotes if it is text"
_FLATTEN = "flatten it: use fewer lists and mappings inside each other"

_TAG = "tag:yaml.org,2002:"
_TABS = re.compile(r"^[ \t]*\t[ \t]*|(?<=[:,\[\]{}\-])[ \t]*\t[ \t]*", re.MULTILINE)
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
FLOAT = re.compile(
    r"""(?:[-+]?(?:(?:\d[\d_]*)?\.\d+(?:[eE][-+]?\d+)?|\d[\d_]*\.(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z""",
    re.VERBOSE,
)
_INT = re.compile(r"(?:[-+]?(?:0|[1-9][\d_]*)|0x[\da-fA-F]+)\Z")
_READS = {
    "null": re.compile(""),
    "bool": re.compile(r"(?:yes|no|true|false|on|off)\Z", re.IGNORECASE),
    "int": _INT,
    "float": re.compile(rf"(?x:{FLOAT.pattern})|{_INT.pattern}".replace("|0x[\\da-fA-F]+", "")),
    "str": re.compile(""),
}
"""Tags of scalars, written or implied, and the texts that each of them accepts."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, with the numbers of YAML 1.2: 1e-5 is a number, while 0123 (octal), 1:30
    (90) and dates are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, p) for tag, p in rules if tag.removeprefix(_TAG) not in ("timestamp", "float", "int", "value")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))


@dataclass
class Spent:
    """How much of a config's size limits its files have used so far."""

    size: int = 0  # bytes
    nodes: int = 0  # values, after aliases are expanded


class _ForeignLoader(_Loader):
    """Takes what other readers take: an anchor that is defined again, of which the last one counts."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if not isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            del self.anchors[event.anchor]
        return super().compose_node(parent, index)


def read_foreign(path: Path) -> Node:
    """Reads a YAML or JSON file of another tool: tabs are spaces, and of a repeated key or anchor the last
    counts.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is too large.
    """
    faults: list[MMError] = []
    root = read_file(path, faults, foreign=True)
    if faults:
        raise ConfigError(faults, where=str(path))
    return root


def read_file(
    path: Path, faults: list[MMError], spent: Spent | None = None, *, foreign: bool = False
) -> Node:
    """Reads a config's YAML file as a tree of nodes that know their file and line.

    Args:
        path: the file.
        faults: receives errors that do not stop the reading.
        spent: what the config's earlier files have used; this file's share is added.
        foreign: whether the file is read as `read_foreign` does it.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is too large.
    """
    spent = Spent() if spent is None else spent
    try:
        content = _content(path, MAX_BYTES - spent.size)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise _not_found(path) from None
    except UnicodeDecodeError as error:
        wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = "the file is UTF-16: save it as UTF-8" if wide else "save the file as UTF-8"
        what = f"the file is not UTF-8 text (byte {error.start})"
        raise ConfigError(what, where=str(path), hint=hint) from None
    except MMError:
        raise
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        hint = "check the path and the file's permissions"
        raise ConfigError(f"the file cannot be read: {cause}", where=str(path), hint=hint) from None
    spent.size += len(content)
    if foreign:
        text = _TABS.sub(lambda tabs: tabs[0].expandtabs(2), text.removeprefix("\ufeff"))
    kind = _ForeignLoader if foreign else _Loader
    tree: Node = _parsed(text, str(path), lambda loader: _tree(loader, str(path), faults, spent), kind)
    return tree


def _content(path: Path, most: int) -> bytes:
    """The bytes of a regular file. A pipe is refused: it may never end, and ranks could not read it again."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        near = ", ".join(map(str, _yaml_files(path)[:8])) or None
        raise ConfigError("this is a folder, not a YAML file", where=str(path), accepted=near)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            "this is a pipe, socket or device, not a file", where=str(path), accepted="a YAML file on disk"
        )
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        what = f"the config is too large: with this file, its files exceed {MAX_BYTES // 1024} KiB in total"
        hint = "check that this is the YAML of a run; rows of data belong in separate files"
        raise ConfigError(what, where=str(path), hint=hint)
    return content


def read_quoted(text: str) -> str | None:
    """The string that a quoted YAML scalar in a config override stands for; None if it is not quoted."""
    try:
        node = _parsed(text, "", lambda loader: loader.get_single_node())
    except ConfigError:
        return None
    return node.value if isinstance(node, yaml.ScalarNode) else None


def read_plain(text: str) -> Any:
    """An unquoted YAML scalar of a config override: an integer, number, boolean, None or string."""
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        node = yaml.ScalarNode(tag, text)
        value = loader.construct_object(node)
        return text if isinstance(value, int) and value.bit_length() > MAX_BITS else value
    except (yaml.YAMLError, ValueError):
        return text
    finally:
        loader.dispose()


def _yaml_files(folder: Path) -> list[Path]:
    files = folder.glob("[!.]*.y*ml") if folder.is_dir() else ()
    return sorted(files)


def _not_found(path: Path) -> ConfigError:
    near = [str(other) for other in _yaml_files(path.parent)]
    hint = (
        did_you_mean(str(path), near) if path.parent.is_dir() else f"the folder {path.parent} does not exist"
    )
    accepted = ", ".join(near[:8]) or None
    return ConfigError("there is no such file", where=str(path), accepted=accepted, hint=hint)


def _parsed(text: str, name: str, read: Callable[[_Loader], Any], kind: type[_Loader] = _Loader) -> Any:
    """Calls `read` with a loader for the text; YAML errors become a ConfigError with the line."""
    try:
        loader = kind(_TRAILING.sub("", text))  # published files have tabs there, which PyYAML refuses
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:  # a control character; it has a position and no line
        line = text.count("\n", 0, error.position) + 1
        what = f"the character U+{ord(text[error.position]):04X} is not allowed"
        where, hint = f"{name}:{line}", "delete this character"
        raise ConfigError(f"this is not YAML: {what}", where=where, hint=hint) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        what = ", ".join(part for part in (error.context, error.problem) if part)
        lines = text.splitlines()
        braces = mark is not None and mark.line < len(lines) and "{" in lines[mark.line]
        hint = "check the indentation, quotes and brackets here and in the lines above"
        if braces:
            hint = "if this is a module pattern with braces, put it in quotes"
        elif mark is not None and mark.line < len(lines) and "\t" in lines[mark.line]:
            hint = "replace tabs by spaces"
        raise ConfigError(f"this is not YAML: {what}", where=where, hint=hint) from None
    except RecursionError:
        what = f"a value in this file is nested more than {MAX_DEPTH} levels deep"
        raise ConfigError(what, where=name, hint=_FLATTEN) from None
    except MMError:
        raise
    except (ValueError, OverflowError) as error:  # an escape such as \U00110000, which PyYAML hands to `chr`
        hint = "check the escapes (\\x, \\u, \\U) in double-quoted strings"
        raise ConfigError(f"this is not YAML: {first_line(error)}", where=name, hint=hint) from None


def _tree(loader: _Loader, name: str, faults: list[MMError], spent: Spent) -> Node:
    root = loader.get_single_node()
    if root is None:
        accepted = (
            "a mapping with run, task, data, train, ..., or with the keys of the section that includes it"
        )
        raise ConfigError("the file is empty", where=name, accepted=accepted)
    return _Reader(loader, name, faults, spent).node(root, "")


class _Reader:
    def __init__(self, loader: _Loader, name: str, faults: list[MMError], spent: Spent) -> None:
        self.loader, self.name, self.faults, self.spent = loader, name, faults, spent
        self.open: set[int] = set()

    def node(self, source: yaml.Node, path: str, key_where: str = "") -> Node:
        where = self._where(source)
        self.spent.nodes += 1
        if id(source) in self.open:
            what = "an alias refers to a value that contains the alias itself"
            raise ConfigError(what, where=where, hint="replace the alias (*name) by a value")
        if self.spent.nodes > MAX_NODES:
            what = f"aliases expand to more than {MAX_NODES:,} values"
            raise ConfigError(what, where=where, hint="use fewer aliases (*name) of large values")
        if len(self.open) >= MAX_DEPTH:
            what = f"this value is nested more than {MAX_DEPTH} levels deep"
            raise ConfigError(what, where=where, hint=_FLATTEN)
        self.open.add(id(source))
        value: Any
        if not isinstance(source, yaml.ScalarNode) and source.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            value = self._fault(
                where, path, f"the tag {source.tag.removeprefix(_TAG)!r} is not supported", _UNTAG
            )
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
        shown = repr(source.value if len(source.value) <= 60 else source.value[:57] + "...")
        tag = source.tag.removeprefix(_TAG)
        if source.tag in self.loader.yaml_constructors and tag not in _READS:
            return self._fault(where, path, f"the tag {tag!r} is not supported", _UNTAG)
        if tag in _READS and not _READS[tag].match(source.value):
            return self._fault(where, path, f"{shown} cannot be read as {tag!r}", _UNTAG)
        try:
            value = self.loader.construct_object(source)
        except yaml.MarkedYAMLError as error:
            return self._fault(where, path, f"{shown} cannot be read: {error.problem}", _UNTAG)
        except ValueError as error:  # an integer of more digits than Python reads
            return self._fault(where, path, f"{shown} cannot be read: {error}", _QUOTE)
        if isinstance(value, str) and (what := unwritable(value)):
            return self._fault(where, path, f"the value cannot be used: {what}", "use plain text")
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            return self._fault(where, path, f"{shown} is an integer of more than {MAX_BITS} bits", _QUOTE)
        return value

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
                self._fault(where, path, f"the key {shown} is not a string", hint="put it in quotes")
                continue
            name = key.value
            if what := unwritable(name):
                self._fault(where, path, f"the key {name[:60]!r} cannot be used: {what}", "use plain text")
                continue
            if len(path) + len(name) > MAX_PATH:
                what = f"the key {name[:40]!r}... and those above it are longer than {MAX_PATH:,} characters"
                raise ConfigError(what, where=where, hint="use shorter keys")
            if name in own and not isinstance(self.loader, _ForeignLoader):
                what = f"the key {name!r} is set twice, first at {own[name].key_where}"
                self._fault(where, path, what, "remove one of the two")
                continue
            own[name] = self.node(child, f"{path}.{name}" if path else name, where)
        return {**merged, **own}

    def _merged(self, source: yaml.Node, path: str) -> dict[str, Node]:
        """The merged mapping, or list of mappings, after `<<:`. Earlier ones win."""
        merged: dict[str, Node] = {}
        for part in source.value if isinstance(source, yaml.SequenceNode) else [source]:
            inner = self.node(part, path)
            if isinstance(inner.value, dict):
                merged = {**inner.value, **merged}
            elif inner.value is not FAILED:
                self._fault(inner.where, path, "'<<' takes a mapping, or a list of mappings", "use <<: *name")
        return merged
