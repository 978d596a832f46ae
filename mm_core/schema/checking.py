"""Checks plain values against annotated dataclasses and collects every error.

The values come as a tree of `Node`s, which know where each value was written, so that the same check serves
YAML files, overrides and Python mappings.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from mm_core.errors import ConfigError, ForeignExit, MMError, PluginError, did_you_mean, foreign_code, plural
from mm_core.schema.annotations import annotations_of
from mm_core.schema.fields import ComponentConfig, Kind, Range, dtype_hint, key_hint, part_hint
from mm_core.schema.nodes import (
    FAILED,
    SCALARS,
    Failed,
    Node,
    default_of,
    describe,
    from_python,
    is_component,
    is_list,
    is_mapping,
    is_plain,
    keys_of,
    read_loose,
    read_number,
    rebuilt,
    show,
    to_python,
    unwrap,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from mm_core.plugin.records import Components

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")

MAX_FAULTS = 100
"""Most errors that are listed for one config: each of them costs a search for similar names."""

_NOT_FINITE = ", which is not finite"
_INFINITE_HINT = "a number that is too large for a float also counts as infinite"


def check_component(
    kind: str, mapping: Mapping[str, object], registry: Components, where: str
) -> ComponentConfig:
    """Checks a plain mapping with `type` against the config dataclass of the component that it names.

    Args:
        kind: the expected kind of component, e.g. `predictor`.
        mapping: `type` and the component's options.
        registry: the plugins that provide components.
        where: key path of the mapping, for errors.

    Raises:
        ConfigError: lists every error in the mapping.
    """
    checker = Checker(registry)
    result = checker.checked(lambda: checker.component(kind, from_python(mapping, "", where)))
    if isinstance(result, Failed):
        raise ConfigError(checker.faults)
    return result


class _TooManyFaults(Exception):
    """There are more than `MAX_FAULTS` errors; the rest of the tree is not checked."""


class Checker:
    """Checks one tree of values against typed dataclasses; `faults` lists the errors in tree order."""

    def __init__(self, registry: Components, infinite: bool = False) -> None:
        self.registry = registry
        self.faults: list[MMError] = []
        self._infinite = infinite  # whether the current field accepts numbers that are not finite

    def checked(self, check: Callable[[], T]) -> T | Failed:
        """Runs a check of values, and returns FAILED if it finds more errors than are listed."""
        try:
            return check()
        except _TooManyFaults:
            return FAILED

    def fault(
        self, node: Node, what: str, accepted: str | None = None, hint: str | None = None, key: bool = False
    ) -> Failed:
        """Records an error at a checked value, and returns FAILED to use as its value.

        Args:
            node: the checked value.
            what: what is wrong.
            accepted: values that would have been accepted.
            hint: what to do next.
            key: whether the error is at the value's key.
        """
        self.faults.append(ConfigError(what, where=node.place(key), accepted=accepted, hint=hint))
        if len(self.faults) > MAX_FAULTS:
            raise _TooManyFaults
        return FAILED

    def _wrong(self, node: Node, accepted: str, hint: str | None = None) -> Failed:
        return self.fault(node, f"found {show(node)}", accepted, hint)

    def dataclass(
        self,
        cls: type[D],
        node: Node,
        *,
        skip: Sequence[str] = (),
        further: Sequence[str] = (),
        owner: str = "",
    ) -> D | Failed:
        """Checks a mapping against an annotated dataclass and returns an instance, or FAILED.

        Args:
            cls: the dataclass. A field's metadata may contain `yaml: False` (not a key) and `aliases` (former
                names of the key, still accepted).
            node: the mapping.
            skip: accepted keys that are not fields.
            further: names to suggest for an unknown key, beside the fields.
            owner: what error messages call the mapping.
        """
        if not isinstance(node.value, dict):
            return self._wrong(node, describe(cls))
        try:
            hints = annotations_of(cls)
        except PluginError as error:
            return self.fault(node, error.what, hint=error.hint)
        fields = keys_of(cls)
        before = len(self.faults)
        aliases = {name: field.metadata.get("aliases", ()) for name, field in fields.items()}
        known = {*skip, *(old for names in aliases.values() for old in names)}
        self._unknown_keys(node, [*fields], (*skip, *further), owner, known)
        values: dict[str, object] = {}
        for name, field in fields.items():
            given = [key for key in (name, *aliases[name]) if key in node.value]
            for other in given[1:]:
                what = f"{other!r} is a former name of {given[0]!r}, and both are set"
                hint = "set only one of them; in an override, use the name that the file uses"
                self.fault(node.value[other], what, hint=hint, key=True)
            if given:
                values[field.name] = self._field(field.default, hints[field.name], node.value[given[0]])
            elif (default := default_of(field)) is not dataclasses.MISSING:
                values[field.name] = self._default(default, node, name)
            else:
                accepted = f"{name}: {describe(hints[field.name])}"
                self.fault(node, f"the key {name!r} is missing", accepted, key=True)
        if len(self.faults) > before or _any_failed(values.values()):
            return FAILED
        return self._construct(cls, values, node)

    def _field(self, default: object, annotation: object, node: Node) -> object:
        before, self._infinite = self._infinite, not is_finite(default)
        try:
            return self.value(annotation, _with_default(node, default))
        finally:
            self._infinite = before

    def _unknown_keys(
        self, node: Node, fields: list[str], others: Sequence[str], owner: str, known: set[str]
    ) -> None:
        for name, child in node.value.items():
            if name not in fields and name not in known:
                what = f"{owner} has no key {name!r}" if owner else f"unknown key {name!r}"
                hint = key_hint(name, [*fields, *others])
                self.fault(child, what, ", ".join(fields) or "no keys", hint, key=True)

    def _construct(self, cls: type[D], values: dict[str, object], node: Node) -> D | Failed:
        """The instance, or FAILED with the error that the class's `__post_init__` raises. An error whose
        message starts with the name of a key is reported at that key."""
        make: Callable[..., D] = cls
        try:
            with foreign_code():
                return make(**values)
        except MMError as error:
            for fault in getattr(error, "faults", ()) or (error,):
                self.fault(_subject(fault.what, node), fault.what, fault.accepted, fault.hint, key=True)
        except (ValueError, TypeError) as error:
            what = str(error) or f"{cls.__name__} does not accept these values"
            self.fault(_subject(what, node), what, key=True)
        except Exception as error:
            cause = str(error) if isinstance(error, ForeignExit) else f"{type(error).__name__}: {error}"
            what = f"{cls.__module__}.{cls.__qualname__} cannot be created: {cause}"
            hint = "this is a bug in the plugin: its config should raise ValueError"
            self.fault(node, what, hint=hint, key=True)
        return FAILED

    def _default(self, value: object, node: Node, name: str) -> object:
        """A default value, with the options of its components filled in."""
        path = node.child_path(name)
        if isinstance(value, ComponentConfig):
            return self.component(value.kind, from_python(value, node.where, path))
        before, inner = len(self.faults), Node(None, node.where, path)
        filled = rebuilt(value, lambda item, key: self._default(item, inner, key))
        return FAILED if len(self.faults) > before else filled

    def component(self, kind: str, node: Node) -> ComponentConfig | Failed:
        """Checks a mapping with `type`, or a bare name, against the component's fields; or FAILED."""
        if isinstance(node.value, Failed):
            return FAILED
        if isinstance(node.value, str):
            node = node.holding({"type": dataclasses.replace(node, loose=False)})
        if not isinstance(node.value, dict):
            return self._wrong(node, describe(Annotated[Any, Kind(kind)]))
        named = node.value.get("type")
        if named is None or not isinstance(named.value, str):
            return self._no_type(kind, node, named)
        try:
            found = self.registry.resolve(kind, named.value)
            cls = found.config_class()
        except PluginError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            return self.fault(named, what, error.accepted, error.hint)
        options = self.dataclass(cls, node, skip=("type",), owner=f"{kind} {found.qualified!r}")
        if isinstance(options, Failed):
            return FAILED
        values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.init}
        # A target's signature may have defaults that YAML cannot express (a module, a dtype). They are
        # left out here: the target has them anyway.
        kept = {name: value for name, value in values.items() if name in node.value or is_plain(value)}
        return ComponentConfig(kind, found.qualified, kept)

    def _no_type(self, kind: str, node: Node, named: Node | None) -> Failed:
        if named is not None and isinstance(named.value, Failed):
            return FAILED
        names = ", ".join(sorted(c.qualified for c in self.registry.components(kind)))
        accepted = f"type: {names}" if names else f"nothing: no installed plugin provides a {kind}"
        if named is not None:
            return self.fault(named, f"found {show(named)} as the type", accepted)
        meant = did_you_mean("type", node.value)
        hint = f"{meant[:-1]} a misspelt 'type'?".replace("did you mean", "is") if meant else None
        hints = (part_hint(key, given.value) for key, given in node.value.items())
        hint = hint or next(filter(None, hints), None)
        return self.fault(node, "the key 'type' is missing", accepted, hint, key=True)

    def value(self, annotation: object, node: Node) -> object:
        """Checks one value against a type annotation and returns it, or FAILED after recording the error."""
        if node.value is FAILED:
            return FAILED
        annotation = unwrap(annotation)
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation is Any:
            return to_python(node)
        if origin is Annotated:
            return self._annotated(args[0], args[1:], node)
        if origin in (Union, types.UnionType):
            return self._union(args, node, describe(annotation))
        if origin is Literal:
            return self._literal(args, node, describe(annotation))
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            return self.dataclass(annotation, node)
        if is_list(annotation):
            return self._list(origin or annotation, args, node, describe(annotation))
        if is_mapping(annotation):
            return self._mapping(args or (Any, Any), node)
        if annotation is None or annotation is types.NoneType:
            return None if node.value is None else self._wrong(node, describe(annotation))
        return self._scalar(annotation, node, describe(annotation))

    def _annotated(self, base: object, marks: tuple[object, ...], node: Node) -> object:
        for mark in marks:
            if isinstance(mark, Kind):
                return self.component(mark.name, node)
        ranges = [mark for mark in marks if isinstance(mark, Range)]
        if not ranges or base not in SCALARS:
            return self.value(base, node)
        words = " ".join([describe(base), *map(str, ranges)])
        value = self._scalar(base, node, words, any(mark.infinite for mark in ranges))
        inside = all(mark.admits(value) for mark in ranges if isinstance(value, (int, float)))
        return value if inside else self._wrong(node, words)

    def _union(self, options: tuple[object, ...], node: Node, accepted: str) -> object:
        trials: list[tuple[object, list[MMError]]] = []
        for option in options:
            trial = Checker(self.registry, self._infinite)
            value = trial.checked(partial(trial.value, option, node))
            if not trial.faults:
                return value
            trials.append((unwrap(option), trial.faults))
        # If exactly one option has the shape of the value, its errors are the most useful ones.
        meant = [faults for option, faults in trials if _shaped(option, node)]
        if len(meant) == 1:
            self.faults += meant[0]
            return FAILED
        for _, faults in trials:
            if len(faults) == 1 and faults[0].what.endswith(_NOT_FINITE):
                return self.fault(node, faults[0].what, accepted, faults[0].hint)
        hints = (fault.hint for _, faults in trials for fault in faults if fault.hint)
        return self._wrong(node, accepted, next(hints, None))

    def _literal(self, choices: tuple[object, ...], node: Node, accepted: str) -> object:
        for choice in choices:
            value = read_loose(type(choice), node.value) if _is_loose(node) else node.value
            if type(choice) is type(value) and choice == value:
                return choice
        words = [choice for choice in choices if isinstance(choice, str)]
        hint = None
        if isinstance(node.value, str):
            hint = dtype_hint(node.value, words) or did_you_mean(node.value, words)
        return self._wrong(node, accepted, hint)

    def _list(self, origin: object, args: tuple[object, ...], node: Node, accepted: str) -> object:
        if not isinstance(node.value, list):
            return self._wrong(node, accepted)
        fixed = origin is tuple and args and args[-1] is not Ellipsis
        if fixed and len(node.value) != len(args):
            return self.fault(node, f"found {plural(len(node.value), 'value')}: {show(node)}", accepted)
        kinds = args if fixed else [args[0] if args else Any] * len(node.value)
        items = [self.value(kind, child) for kind, child in zip(kinds, node.value, strict=True)]
        if _any_failed(items):
            return FAILED
        return items if origin is list else tuple(items)

    def _mapping(self, args: tuple[object, ...], node: Node) -> object:
        if not isinstance(node.value, dict):
            return self._wrong(node, "a mapping of keys to values")
        items: dict[object, object] = {}
        for key, child in node.value.items():
            # Keys are strings in the tree: they are converted by type, like strings from the environment.
            name = self.value(args[0], dataclasses.replace(child, value=key, loose=True))
            items[name] = self.value(args[1], child)
        return FAILED if _any_failed(items) or _any_failed(items.values()) else items

    def _scalar(self, annotation: object, node: Node, accepted: str, infinite: bool = False) -> object:
        value = node.value
        if annotation is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = value if isinstance(value, float) else read_number(value)
            if number is None:
                return self._wrong(node, accepted)
            if math.isfinite(number) or infinite or self._infinite:
                return number
            return self.fault(node, f"found {show(node)}{_NOT_FINITE}", accepted, _INFINITE_HINT)
        if _is_loose(node):
            value = read_loose(annotation, value)
        if annotation is Path and isinstance(value, str):
            return Path(value)
        if annotation in SCALARS and type(value) is not annotation and not isinstance(value, Path):
            quotable = annotation is str and isinstance(value, (int, float))
            return self._wrong(node, accepted, "put it in quotes" if quotable else None)
        if isinstance(annotation, type) and not isinstance(value, annotation):
            return self._wrong(node, accepted)
        return value if not isinstance(value, (dict, list)) else to_python(node)


def is_finite(default: object) -> bool:
    """Whether a field's default is finite: if it is not, the field accepts infinity too."""
    if isinstance(default, (tuple, list)):
        return all(map(is_finite, default))
    return not isinstance(default, float) or math.isfinite(default)


def _with_default(node: Node, default: object) -> Node:
    """Fills in `type` and options of the field's default component in a mapping without `type`."""
    if isinstance(default, ComponentConfig) and isinstance(node.value, dict) and "type" not in node.value:
        given = from_python(default, node.where, node.path)
        return node.holding({**given.value, **node.value})
    return node


def _any_failed(values: Iterable[object]) -> bool:
    return any(value is FAILED for value in values)


def _is_loose(node: Node) -> bool:
    return node.loose and isinstance(node.value, str)


def _subject(what: str, node: Node) -> Node:
    """The child of `node` whose key a message starts with, or `node`."""
    child = node.value.get((what.split() or [""])[0].strip("'\":,"))
    return child if isinstance(child, Node) else node


def _shaped(option: object, node: Node) -> bool:
    if is_component(option):
        return isinstance(node.value, (dict, str))
    return (isinstance(node.value, dict) and is_mapping(option)) or (
        isinstance(node.value, list) and is_list(option)
    )
