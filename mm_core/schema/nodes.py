"""Values that know where they were written, and how error messages describe them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

from mm_core.errors import article
from mm_core.schema.fields import ComponentConfig, Kind, Range, yaml_key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCALARS: Mapping[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
}
"""What a scalar field accepts, in the words of error messages."""
_QUOTED = 64  # most characters or items of a value that an error message quotes
_FOUND: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}
_BOOLEANS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True)
class Node:
    """A node: a value to check against a type, with the file and line where it was written.

    Attributes:
        value: a scalar, a list of Nodes, a dict of Nodes by key, or FAILED if it could not be read (the error
            is recorded already).
        where: place of the value, e.g. `file:line`.
        path: dotted key path.
        key_where: place of the key.
        loose: the value is a string from an interpolation, to be converted to the type of its field.
    """

    value: Any
    where: str
    path: str
    key_where: str = ""
    loose: bool = False

    @property
    def children(self) -> list[Node]:
        """The child nodes of a node that is a mapping or list; [] for any other node."""
        if isinstance(self.value, dict):
            return list(self.value.values())
        return self.value if isinstance(self.value, list) else []

    def at(self, *keys: str) -> Node | None:
        """The node at a path of keys below this node; None if there is none."""
        found: Node | None = self
        for key in keys:
            found = found.value.get(key) if found is not None and isinstance(found.value, dict) else None
        return found

    def items(self, *keys: str) -> list[Node]:
        """The nodes of the list at a path of keys below this node; [] if there is no list."""
        found = self.at(*keys)
        return found.value if found is not None and isinstance(found.value, list) else []

    def leaves(self) -> Iterator[Node]:
        """All nodes with scalar values below this node."""
        if isinstance(self.value, (dict, list)):
            for child in self.children:
                yield from child.leaves()
        else:
            yield self

    def mapped(self, change: Callable[[Node], Node]) -> Node:
        """A copy of this node with each child node changed."""
        if isinstance(self.value, dict):
            return self.holding({key: change(child) for key, child in self.value.items()})
        if isinstance(self.value, list):
            return self.holding([change(child) for child in self.value])
        return self

    def put(self, key: str, child: Node) -> Node:
        """A copy of this node, a mapping, with another child node at a key."""
        return self.holding({**self.value, key: child})

    def holding(self, value: object) -> Node:
        """A copy of this node with another value at the same file and line."""
        return dataclasses.replace(self, value=value)

    def place(self, key: bool = False) -> str:
        """Where the value of this node, or its key, was written: `file:line: key.path`."""
        where = self.key_where or self.where if key else self.where
        return ": ".join(part for part in (where, self.path) if part)

    def child_path(self, key: object) -> str:
        """The dotted key path of a child of this node."""
        return f"{self.path}.{key}" if self.path else str(key)


class Failed:
    """The type of FAILED, which replaces a checked value with an error."""


FAILED: Final = Failed()


def keys_of(cls: type[DataclassInstance]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a typed dataclass that are keys of its mapping in a YAML, by key."""
    found = [f for f in dataclasses.fields(cls) if f.init and f.metadata.get("yaml", True)]
    return {yaml_key(f.name): f for f in found}


def inside(value: object) -> dict[str, object] | list[object] | None:
    """The items of a component, dataclass, mapping or list to check, as YAML would write them.

    None for any other value.
    """
    if isinstance(value, ComponentConfig):
        return {"type": value.type, **{yaml_key(name): item for name, item in value.options.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: getattr(value, f.name) for key, f in keys_of(type(value)).items()}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else None


def leaves(value: Any, key: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """What is in nested mappings (and lists) and is not one of them, or an empty one, by dotted key."""
    if value and (isinstance(value, Mapping) or (lists and isinstance(value, list))):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(item, f"{key}.{name}" if key else str(name), lists=lists)
    else:
        yield key, value


def rebuilt(value: object, change: Callable[[object, str], object]) -> object:
    """A checked tuple, list or dataclass with each value replaced by `change(value, key)`.

    Any other value is returned unchanged.
    """
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(change(item, str(index)) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: change(getattr(value, name), name) for name in names})
    return value


def default_of(field: dataclasses.Field[Any]) -> object:
    """The default of a field of a typed dataclass; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def from_python(value: object, where: str, path: str = "", loose: bool = False) -> Node:
    """A tree of nodes from a plain Python value, to check it against types.

    Args:
        value: the value.
        where: its place, for error messages.
        path: its key path.
        loose: strings in it are to be converted to the types of their fields.
    """
    held, here = inside(value), Node(value, where, path, loose=loose)
    if isinstance(held, dict):
        return here.holding({k: from_python(v, where, here.child_path(k), loose) for k, v in held.items()})
    if isinstance(held, list):
        return here.holding([from_python(v, where, here.child_path(i), loose) for i, v in enumerate(held)])
    return here


def to_python(node: Node) -> object:
    """The plain Python value of a tree of nodes."""
    if isinstance(node.value, dict):
        return {key: to_python(child) for key, child in node.value.items()}
    return [*map(to_python, node.value)] if isinstance(node.value, list) else node.value


def is_plain(value: object) -> bool:
    """Whether a checked value can be written as YAML."""
    if isinstance(value, (list, tuple)) and type(value) not in (list, tuple):
        return False
    if (held := inside(value)) is not None:
        return all(map(is_plain, held.values() if isinstance(held, dict) else held))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Path)


def read_loose(annotation: object, text: str) -> bool | int | float | str:
    """Converts a string from the environment to the type of its typed field; unchanged if it cannot be."""
    if annotation is bool:
        return _BOOLEANS.get(text.strip().lower(), text)
    try:
        return int(text) if annotation is int else float(text) if annotation is float else text
    except ValueError:
        return text


def read_number(value: int | str) -> float | None:
    """Converts an integer or a string such as "1e-5" (a string in YAML 1.1) for a field of type float."""
    if isinstance(value, str) and not any(map(str.isdigit, value)):
        return None  # Python would accept "infinity" and "nan", which nobody types on purpose
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def show(node: Node) -> str:
    """A node's value with its type, shortened, as errors of the type check quote it."""
    if node.value is None:
        return "nothing (null)"
    text = repr(_beginning(node, iter(range(_QUOTED))))
    name = _FOUND.get(type(node.value), type(node.value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, {name}"


def _beginning(node: Node, left: Iterator[int]) -> object:
    """The plain value, or the start of a large one: there may be many errors that quote it."""
    value = node.value
    if isinstance(value, dict):
        items = takewhile(lambda _: next(left, None) is not None, value.items())
        return {key[:_QUOTED]: _beginning(child, left) for key, child in items}
    if isinstance(value, list):
        return [_beginning(child, left) for child in takewhile(lambda _: next(left, None) is not None, value)]
    return value[:_QUOTED] if isinstance(value, str) else value


def unwritable(text: str) -> str | None:
    """Why a checked string cannot be used in a file, name or path; None if it can."""
    if "\0" in text:
        return "it contains a NUL character, which no path or name can contain"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it contains bytes or characters that are not Unicode text"
    return None


def describe(annotation: object) -> str:
    """The values that a type annotation accepts, in the words of errors of the type check."""
    annotation = unwrap(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "anything"
    if origin is Annotated:
        kinds = [mark.name for mark in args[1:] if isinstance(mark, Kind)]
        if kinds:
            return f"{article(kinds[0])} (a name, or a mapping with type:)"
        return " ".join([describe(args[0]), *(str(mark) for mark in args[1:] if isinstance(mark, Range))])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option) for option in args)
    if origin is Literal:
        return ", ".join(str(choice) if isinstance(choice, str) else repr(choice) for choice in args)
    if annotation is types.NoneType or annotation is None:
        return "null"
    if is_list(annotation):
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: " + ", ".join(describe(arg) for arg in args)
        return f"a list, each {describe(args[0])}" if args else "a list"
    if is_mapping(annotation):
        return "a mapping of keys to values"
    return SCALARS.get(annotation) or str(getattr(annotation, "__name__", annotation))


def unwrap(annotation: object) -> object:
    """The type annotation behind a NewType, an alias made by Python 3.12's `type` statement, or marks other
    than Kind and Range."""
    held_by = {"TypeAliasType": "__value__", "NewType": "__supertype__"}
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        return annotation if any(isinstance(mark, (Kind, Range)) for mark in marks) else unwrap(base)
    name = held_by.get(type(annotation).__name__)
    return unwrap(getattr(annotation, name)) if name is not None else annotation


def is_list(annotation: object) -> bool:
    """Whether the type annotation of a field accepts a list."""
    return (get_origin(annotation) or annotation) in (list, tuple, Sequence)


def is_mapping(annotation: object) -> bool:
    """Whether the type annotation of a field accepts a mapping."""
    plain = (get_origin(annotation) or annotation) in (dict, Mapping)
    return plain or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation))


def is_component(annotation: object) -> bool:
    """Whether the type annotation of a field accepts a component."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return any(isinstance(mark, Kind) for mark in marks)
