"""Values that remember where they were written, and the words in which faults speak of them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from mm_core.plugin.schema.fields import ComponentConfig, Kind, Range


@dataclass(frozen=True)
class Node:
    """A value and where it was written.

    value: a scalar, a list of Nodes, a dict of Nodes by key, or FAILED when it could not be read,
    which was then reported already. where: `file:line` or the like. path: dotted key path.
    key_where: where the key stands. loose: a text that came out of an interpolation, to be read by
    the type of its field.
    """

    value: Any
    where: str
    path: str
    key_where: str = ""
    loose: bool = False

    def place(self, key: bool = False) -> str:
        """`file:line: key.path`."""
        where = self.key_where or self.where if key else self.where
        return ": ".join(part for part in (where, self.path) if part)

    def child_path(self, key: object) -> str:
        """The key path of what stands at `key` in this node."""
        return f"{self.path}.{key}" if self.path else str(key)


class _Failed:
    """What a value that did not check becomes."""


FAILED: Final = _Failed()
SCALARS: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    Path: "a path",
}
"""How faults name what a scalar field accepts."""

_QUOTED = 64  # characters or items of a value that a fault looks at

_FOUND: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}

_BOOLEANS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def from_python(value: Any, where: str, path: str = "", loose: bool = False) -> Node:
    """A tree of a plain Python value."""
    if isinstance(value, ComponentConfig):
        value = {"type": value.type, **value.options}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    here = Node(value, where, path, loose=loose)
    if isinstance(value, Mapping):
        inner = {str(k): from_python(v, where, here.child_path(k), loose) for k, v in value.items()}
        return dataclasses.replace(here, value=inner)
    if isinstance(value, (list, tuple)):
        items = [from_python(v, where, here.child_path(i), loose) for i, v in enumerate(value)]
        return dataclasses.replace(here, value=items)
    return here


def to_python(node: Node) -> Any:
    """The plain value of a tree."""
    if isinstance(node.value, dict):
        return {key: to_python(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_python(child) for child in node.value]
    return node.value


def is_plain(value: Any) -> bool:
    """Whether a YAML can hold the value."""
    if isinstance(value, ComponentConfig):
        return is_plain(value.options)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_plain(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Path)


def read_loose(annotation: Any, text: str) -> Any:
    """A text from the environment as the scalar that its field wants; unchanged when it is none."""
    if annotation is bool:
        return _BOOLEANS.get(text.strip().lower(), text)
    try:
        return annotation(text) if annotation in (int, float) else text
    except ValueError:
        return text


def read_number(value: int | str) -> float | None:
    """An integer, or a text such as "1e-5" (which YAML 1.1 takes for a text), as a float."""
    if isinstance(value, str) and not any(map(str.isdigit, value)):
        return None  # Python reads "infinity" and "nan" too, which nobody types on purpose
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def show(node: Node) -> str:
    """A value with its type, shortened, as faults quote it."""
    if node.value is None:
        return "nothing (null)"
    text = repr(_beginning(node, iter(range(_QUOTED))))
    name = _FOUND.get(type(node.value), type(node.value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, {name}"


def _beginning(node: Node, left: Iterator[int]) -> Any:
    """The plain value, or as much of a large one as a fault quotes: there may be many faults."""
    value = node.value
    if isinstance(value, dict):
        items = takewhile(lambda _: next(left, None) is not None, value.items())
        return {key[:_QUOTED]: _beginning(child, left) for key, child in items}
    if isinstance(value, list):
        return [_beginning(child, left) for child in takewhile(lambda _: next(left, None) is not None, value)]
    return value[:_QUOTED] if isinstance(value, str) else value


def unwritable(text: str) -> str | None:
    """Why no file, name or path can hold a text; None for one that they can."""
    if "\0" in text:
        return "it holds a NUL character, which no path and no name can"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it holds bytes or characters that are not Unicode text"
    return None


def describe(annotation: Any) -> str:
    """What a field accepts, in words."""
    annotation = unwrap(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "anything"
    if origin is Annotated:
        kinds = [mark.name for mark in args[1:] if isinstance(mark, Kind)]
        if kinds:
            article = "an" if kinds[0][0] in "aeiou" else "a"
            return f"{article} {kinds[0]} (a name, or a mapping with type:)"
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
    return SCALARS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def unwrap(annotation: Any) -> Any:
    """What a NewType, or an alias made by Python 3.12's `type` statement, stands for."""
    while True:
        if type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif type(annotation).__name__ == "NewType":
            annotation = annotation.__supertype__
        else:
            return annotation


def is_list(annotation: Any) -> bool:
    """Whether a field takes a list."""
    return (get_origin(annotation) or annotation) in (list, tuple, Sequence)


def is_mapping(annotation: Any) -> bool:
    """Whether a field takes a mapping."""
    plain = (get_origin(annotation) or annotation) in (dict, Mapping)
    return plain or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation))


def is_component(annotation: Any) -> bool:
    """Whether a field takes a component."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return any(isinstance(mark, Kind) for mark in marks)
