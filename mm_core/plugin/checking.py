"""Checks plain values against annotated dataclasses and collects every fault.

The values come as a tree of `Node`s, which remember where each of them was written, so that the
same check serves YAML files, overrides and Python mappings.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from mm_core.errors import ConfigError, MMError, PluginError, did_you_mean
from mm_core.plugin.fields import ComponentConfig, Kind, Range

if TYPE_CHECKING:
    from mm_core.plugin.registry import Registry


@dataclass(frozen=True)
class Node:
    """A value and where it was written.

    value: a scalar, a list of Nodes, or a dict of Nodes by key. where: `file:line` or the like.
    path: dotted key path. key_where: where the key stands. loose: a text that came out of an
    interpolation, to be read by the type of its field.
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


class _Failed:
    """What a value that did not check becomes."""


FAILED: Final = _Failed()
_SCALARS: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def from_python(value: Any, where: str, path: str = "", loose: bool = False) -> Node:
    """A tree of a plain Python value."""
    if isinstance(value, ComponentConfig):
        value = {"type": value.type, **value.options}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        inner = {
            str(k): from_python(v, where, f"{path}.{k}" if path else str(k), loose) for k, v in value.items()
        }
        return Node(inner, where, path)
    if isinstance(value, (list, tuple)):
        return Node([from_python(v, where, f"{path}.{i}", loose) for i, v in enumerate(value)], where, path)
    return Node(value, where, path, loose=loose)


def to_python(node: Node) -> Any:
    """The plain value of a tree."""
    if isinstance(node.value, dict):
        return {key: to_python(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_python(child) for child in node.value]
    return node.value


def check_component(kind: str, mapping: Mapping[str, Any], registry: Registry, where: str) -> ComponentConfig:
    """A plain mapping with `type` as a checked reference. ConfigError with every fault."""
    checker = Checker(registry)
    result = checker.component(kind, from_python(mapping, "", where))
    if checker.faults:
        raise ConfigError(checker.faults)
    assert isinstance(result, ComponentConfig)
    return result


class Checker:
    """One pass over a tree. `faults` holds what was found, in the order of the tree."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.faults: list[MMError] = []

    def fault(
        self,
        node: Node,
        what: str,
        *,
        key: bool = False,
        accepted: str | None = None,
        hint: str | None = None,
    ) -> _Failed:
        """Notes a fault at a node."""
        self.faults.append(ConfigError(what, where=node.place(key), accepted=accepted, hint=hint))
        return FAILED

    # -- structures ------------------------------------------------------------------------------

    def dataclass(self, cls: type[Any], node: Node, skip: Sequence[str] = (), owner: str = "") -> Any:
        """An instance of `cls` from a mapping; `skip` names keys that are not fields."""
        if not isinstance(node.value, dict):
            return self.fault(node, f"found {show(node)}", accepted="a mapping of keys to values")
        hints = get_type_hints(cls, include_extras=True)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.metadata.get("yaml", True)}
        before = len(self.faults)
        for name, child in node.value.items():
            if name not in fields and name not in skip:
                subject = f"{owner} has no key {name!r}" if owner else f"unknown key {name!r}"
                self.fault(
                    child,
                    subject,
                    key=True,
                    accepted=", ".join(fields) or "no keys",
                    hint=did_you_mean(name, fields),
                )
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in node.value:
                values[name] = self.value(hints[name], node.value[name])
            elif field.default is not dataclasses.MISSING:
                values[name] = self._default(field.default, node, name)
            elif field.default_factory is not dataclasses.MISSING:
                values[name] = self._default(field.default_factory(), node, name)
            else:
                accepted = f"{name}: {describe(hints[name])}"
                self.fault(node, f"the key {name!r} is missing", accepted=accepted)
        if len(self.faults) > before:
            return FAILED
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            known = isinstance(error, MMError)
            return self.fault(
                node,
                error.what if isinstance(error, MMError) else str(error),
                accepted=error.accepted if isinstance(error, MMError) else None,
                hint=error.hint if isinstance(error, MMError) and known else None,
            )

    def _default(self, value: Any, node: Node, name: str) -> Any:
        """A default, with the options of the components in it filled."""
        path = f"{node.path}.{name}" if node.path else name
        if isinstance(value, ComponentConfig):
            return self.component(value.kind, from_python(value, node.where, path))
        if type(value) in (tuple, list):
            return type(value)(self._default(item, node, f"{name}.{i}") for i, item in enumerate(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = Node(node.value, node.where, path)
            filled = {
                f.name: self._default(getattr(value, f.name), inner, f.name)
                for f in dataclasses.fields(value)
                if f.init
            }
            return dataclasses.replace(value, **filled)
        return value

    def component(self, kind: str, node: Node) -> Any:
        """A ComponentConfig from a mapping with `type`, or from a bare name."""
        if isinstance(node.value, str):
            node = dataclasses.replace(node, value={"type": Node(node.value, node.where, node.path)})
        if not isinstance(node.value, dict):
            return self.fault(
                node, f"found {show(node)}", accepted=f"the name of a {kind}, or a mapping with type:"
            )
        named = node.value.get("type")
        if named is None or not isinstance(named.value, str):
            names = ", ".join(sorted(c.qualified for c in self.registry.components(kind)))
            what = "the key 'type' is missing" if named is None else f"found {show(named)} as the type"
            return self.fault(named or node, what, accepted=names or f"no {kind} is installed")
        try:
            found = self.registry.resolve(kind, named.value)
            cls = found.config_class()
        except PluginError as error:
            return self.fault(named, error.what, accepted=error.accepted, hint=error.hint)
        options = self.dataclass(cls, node, skip=("type",), owner=f"{kind} {found.qualified!r}")
        if options is FAILED:
            return FAILED
        values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.init}
        return ComponentConfig(kind, found.qualified, values)

    # -- values ----------------------------------------------------------------------------------

    def value(self, annotation: Any, node: Node) -> Any:
        """`node` as a value of `annotation`, or FAILED with the fault noted."""
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation is Any:
            return to_python(node)
        if origin is Annotated:
            return self._annotated(args[0], args[1:], node)
        if origin in (Union, types.UnionType):
            return self._union(args, node, annotation)
        if origin is Literal:
            return self._literal(args, node, annotation)
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            return self.dataclass(annotation, node)
        if (origin or annotation) in (list, tuple, Sequence):
            return self._list(origin or annotation, args, node, annotation)
        if (origin or annotation) in (dict, Mapping):
            return self._mapping(args, node)
        if annotation is None or annotation is types.NoneType:
            return None if node.value is None else self._wrong(node, annotation)
        return self._scalar(annotation, node)

    def _annotated(self, base: Any, marks: tuple[Any, ...], node: Node) -> Any:
        for mark in marks:
            if isinstance(mark, Kind):
                return self.component(mark.name, node)
        value = self.value(base, node)
        for mark in marks:
            if isinstance(mark, Range) and isinstance(value, (int, float)) and not mark.admits(value):
                return self.fault(node, f"found {show(node)}", accepted=describe(Annotated[base, mark]))
        return value

    def _union(self, options: tuple[Any, ...], node: Node, annotation: Any) -> Any:
        trials: list[tuple[Any, list[MMError]]] = []
        for option in options:
            trial = Checker(self.registry)
            value = trial.value(option, node)
            if not trial.faults:
                return value
            trials.append((option, trial.faults))
        real = [found for option, found in trials if option is not types.NoneType]
        if len(real) == 1:
            self.faults += real[0]
            return FAILED
        return self._wrong(node, annotation)

    def _literal(self, choices: tuple[Any, ...], node: Node, annotation: Any) -> Any:
        for choice in choices:
            if type(choice) is type(node.value) and choice == node.value:
                return choice
        hint = (
            did_you_mean(node.value, [c for c in choices if isinstance(c, str)])
            if isinstance(node.value, str)
            else None
        )
        return self.fault(node, f"found {show(node)}", accepted=describe(annotation), hint=hint)

    def _list(self, origin: type, args: tuple[Any, ...], node: Node, annotation: Any) -> Any:
        if not isinstance(node.value, list):
            return self._wrong(node, annotation)
        fixed = origin is tuple and args and args[-1] is not Ellipsis
        if fixed and len(node.value) != len(args):
            return self.fault(
                node, f"found {len(node.value)} values: {show(node)}", accepted=describe(annotation)
            )
        kinds = args if fixed else [args[0] if args else Any] * len(node.value)
        items = [self.value(kind, child) for kind, child in zip(kinds, node.value, strict=True)]
        if any(item is FAILED for item in items):
            return FAILED
        return items if origin is list else tuple(items)

    def _mapping(self, args: tuple[Any, ...], node: Node) -> Any:
        if not isinstance(node.value, dict):
            return self.fault(node, f"found {show(node)}", accepted="a mapping of keys to values")
        items = {key: self.value(args[1] if args else Any, child) for key, child in node.value.items()}
        return FAILED if any(item is FAILED for item in items.values()) else items

    def _scalar(self, annotation: Any, node: Node) -> Any:
        value = (
            read_loose(annotation, node.value) if node.loose and isinstance(node.value, str) else node.value
        )
        if annotation is float and type(value) is int:
            return float(value)
        if annotation is Path and isinstance(value, str):
            return Path(value)
        if annotation in _SCALARS:
            if type(value) is annotation:
                return value
            hint = "put it in quotes" if annotation is str and isinstance(value, (int, float, bool)) else None
            return self.fault(node, f"found {show(node)}", accepted=describe(annotation), hint=hint)
        if (
            isinstance(annotation, type)
            and not isinstance(value, (dict, list))
            and not isinstance(value, annotation)
        ):
            return self._wrong(node, annotation)
        return to_python(node)

    def _wrong(self, node: Node, annotation: Any) -> _Failed:
        return self.fault(node, f"found {show(node)}", accepted=describe(annotation))


def read_loose(annotation: Any, text: str) -> Any:
    """A text from the environment as the scalar that its field wants; unchanged when it is none."""
    readers: Mapping[Any, Callable[[str], Any]] = {int: int, float: float}
    try:
        if annotation is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.strip().lower()]
        return readers[annotation](text) if annotation in readers else text
    except (ValueError, KeyError):
        return text


def show(node: Node) -> str:
    """A value with its type, shortened, as faults quote it."""
    value = to_python(node)
    if value is None:
        return "nothing (null)"
    text = repr(value)
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a mapping",
    }
    return f"{text if len(text) <= 60 else text[:57] + '...'}, {names.get(type(value), type(value).__name__)}"


def describe(annotation: Any) -> str:
    """What a field accepts, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "anything"
    if origin is Annotated:
        kinds = [mark.name for mark in args[1:] if isinstance(mark, Kind)]
        if kinds:
            return f"a {kinds[0]} (a name, or a mapping with type:)"
        return " ".join([describe(args[0]), *(str(mark) for mark in args[1:] if isinstance(mark, Range))])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option) for option in args)
    if origin is Literal:
        return ", ".join(str(choice) if isinstance(choice, str) else repr(choice) for choice in args)
    if annotation is types.NoneType or annotation is None:
        return "null"
    if (origin or annotation) in (list, tuple, Sequence):
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: " + ", ".join(describe(arg) for arg in args)
        return f"a list, each {describe(args[0])}" if args else "a list"
    if (origin or annotation) in (dict, Mapping) or dataclasses.is_dataclass(annotation):
        return "a mapping of keys to values"
    return _SCALARS.get(annotation, getattr(annotation, "__name__", str(annotation)))
