"""Typed dataclasses and components as JSON Schema (draft 2020-12), with which editors complete and check."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import quote

from mm_core.errors import MMError, PluginError, foreign_code
from mm_core.schema.checking import is_finite
from mm_core.schema.describe import KeyInfo, describe_keys, summary_of
from mm_core.schema.fields import ComponentConfig, Kind, Range
from mm_core.schema.nodes import from_python, is_list, is_mapping, to_python, unwrap

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from mm_core.plugin.registry import Registered, Registry

Schema = dict[str, Any]

_LARGEST = sys.float_info.max
_BOUNDS = MappingProxyType(
    {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
)
TEXTS: dict[str, Schema] = {
    "interpolation": {
        "type": "string",
        "pattern": r"\$\{",
        "description": "a reference: ${key.path}, ${oc.env:NAME} or ${oc.env:NAME,default}",
    },
    # What YAML 1.1 and Python read otherwise than the YAML 1.2 of editors.
    "boolean_text": {"type": "string", "pattern": "^([Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$"},
    "integer_text": {"type": "string", "pattern": "^[-+]?[1-9][0-9_]*_[0-9_]*$"},
    "number_text": {
        "type": "string",
        "pattern": r"^\s*[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9][0-9_]*)?\s*$",
    },
}
"""Definitions of strings that fields of other types accept."""
_REFERENCE: Schema = {"$ref": "#/$defs/interpolation"}


class SchemaWriter:
    """Writes JSON Schema for typed values; `definitions` collects what the schemas refer to.

    Args:
        registry: the plugins that provide components.
        partial: whether the values are part of a config only: other files add keys, and plugins that are not
            installed add components. Then no key is required, and a `type` may be any name.
    """

    def __init__(self, registry: Registry, definitions: dict[str, Schema], partial: bool = False) -> None:
        self.registry = registry
        self.definitions = definitions
        self.partial = partial
        self.faults: list[MMError] = []
        """Components whose config class does not load; their keys are not checked."""
        self._infinite = False  # whether the current field accepts numbers that are not finite

    # -- mappings --------------------------------------------------------------------------------

    def mapping(self, cls: type[DataclassInstance], further: Schema | None = None) -> Schema:
        """The schema of a mapping that is checked against a typed dataclass.

        Args:
            cls: the dataclass.
            further: schemas of accepted keys that are not fields.
        """
        properties: Schema = dict(further or {})
        rules: list[Schema] = []
        required: list[str] = []
        for key, info in describe_keys(cls).items():
            properties[key] = self._field(info)
            for alias in info.aliases:
                properties[alias] = {**properties[key], "deprecated": True}
                rules.append({"not": {"required": [key, alias]}})
            if info.default is dataclasses.MISSING and info.aliases:
                rules.append({"anyOf": [{"required": [name]} for name in (key, *info.aliases)]})
            elif info.default is dataclasses.MISSING:
                required.append(key)
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if required and not self.partial:
            schema["required"] = required
        if rules and not self.partial:
            schema["allOf"] = rules
        return schema

    def _field(self, info: KeyInfo) -> Schema:
        before, self._infinite = self._infinite, not is_finite(info.default)
        try:
            schema = dict(self.value(info.hint, info.default))
        finally:
            self._infinite = before
        if info.field.comment:
            schema["description"] = info.field.comment
        if (default := _as_json(info.default)) is not dataclasses.MISSING:
            schema["default"] = default
        return schema

    def _defined(self, name: str, write: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is written when it is first referred to."""
        name = f"partial.{name}" if self.partial else name
        if name not in self.definitions:
            self.definitions[name] = {}  # it may refer to itself
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{quote(name.replace('/', '~1'), safe=':')}"}

    def _dataclass(self, cls: type[DataclassInstance]) -> Schema:
        name = f"{cls.__module__}.{cls.__qualname__}"
        return self._defined(name, lambda: _described(self.mapping(cls), summary_of(cls)))

    # -- components ------------------------------------------------------------------------------

    def component(self, kind: str, default: object = dataclasses.MISSING) -> list[Schema]:
        """The alternatives for a component of a kind: a bare name, or a mapping with `type`.

        Args:
            kind: the kind.
            default: the field's default; if it is a component, `type` may be left out.
        """
        names = self._defined(f"{kind}.names", lambda: self._names(kind))
        if not isinstance(default, ComponentConfig):
            return [names, self._defined(kind, lambda: self._branches(kind, names, None))]
        own = f"{kind}:{default.type}:default"
        return [names, self._defined(own, lambda: self._branches(kind, names, default.type))]

    def _names(self, kind: str) -> Schema:
        names = [name for found in self._components(kind) for name in self._names_of(found)]
        known: Schema = {"enum": names} if names else {"not": {}}
        choices = [known, {"type": "string"}] if self.partial else [known, _REFERENCE]
        return {"anyOf": choices, "description": f"name of a {kind.replace('_', ' ')}"}

    def _branches(self, kind: str, names: Schema, default: str | None) -> Schema:
        """A mapping with `type`, whose other keys depend on the type."""
        branches: list[Schema] = []
        for found in self._components(kind):
            options = self._defined(f"{kind}:{found.qualified}", partial(self._options, found, names))
            this = {"enum": self._names_of(found)}
            branches.append({"if": {"required": ["type"], "properties": {"type": this}}, "then": options})
            if found.qualified == default and not self.partial:
                branches.append({"if": {"not": {"required": ["type"]}}, "then": options})
        schema: Schema = {"type": "object", "properties": {"type": names}, "allOf": branches}
        if default is None and not self.partial:
            schema["required"] = ["type"]
        if not branches:
            del schema["allOf"]
        return schema

    def _options(self, found: Registered, names: Schema) -> Schema:
        """The keys of one component. They are open where only an import of the target would show them."""
        described = found.component.summary or found.qualified
        if found.component.config is None:
            return _described({"type": "object"}, described)
        try:
            with foreign_code():
                return _described(self.mapping(found.config_class(), {"type": names}), described)
        except MMError as fault:
            place = fault.where or found.place
            self.faults.append(MMError(fault.what, where=place, accepted=fault.accepted, hint=fault.hint))
        except Exception as error:  # defaults are plugin code: they may raise anything
            what = f"the fields of {found.component.config} cannot be read: {error}"
            self.faults.append(MMError(what, where=found.place))
        return _described({"type": "object"}, described)

    def _components(self, kind: str) -> list[Registered]:
        return sorted(self.registry.components(kind), key=lambda found: found.qualified)

    def _names_of(self, found: Registered) -> list[str]:
        """All names by which a config can refer to a component, the bare ones first."""
        names = [*found.names, *(f"{found.namespace}/{name}" for name in found.names)]
        return [name for name in names if self._means(found, name)]

    def _means(self, found: Registered, name: str) -> bool:
        try:
            return self.registry.resolve(found.kind, name) == found
        except PluginError:  # several plugins provide this name
            return False

    # -- values ----------------------------------------------------------------------------------

    def value(self, annotation: object, default: object = dataclasses.MISSING) -> Schema:
        """The schema of the values that a type annotation accepts, interpolations included.

        Args:
            annotation: the type annotation.
            default: the field's default; MISSING if it has none.
        """
        choices = self._choices(annotation, default)
        if not all(choices):
            return {}  # one of them accepts everything
        if {"type": "string"} not in choices:
            choices = [*choices, _REFERENCE]
        unique = [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _choices(self, annotation: object, default: object = dataclasses.MISSING) -> list[Schema]:
        """The alternatives among which a value of a type may be; an empty schema accepts everything."""
        annotation = unwrap(annotation)
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._annotated(args[0], args[1:], default)
        if origin in (Union, types.UnionType):
            return [choice for option in args for choice in self._choices(option, default)]
        if origin is Literal:
            return [{"enum": list(args)}]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            return [self._dataclass(annotation)]
        if is_list(annotation):
            return [self._list(origin or annotation, args)]
        if is_mapping(annotation):
            return [self._free_mapping(args)]
        if annotation is None or annotation is types.NoneType:
            return [{"type": "null"}]
        return self._scalar(annotation, ())

    def _annotated(self, base: object, marks: tuple[object, ...], default: object) -> list[Schema]:
        for mark in marks:
            if isinstance(mark, Kind):
                return self.component(mark.name, default)
        ranges = tuple(mark for mark in marks if isinstance(mark, Range))
        if ranges and base in (int, float):
            return self._scalar(base, ranges)
        return self._choices(base, default)

    def _list(self, origin: object, args: tuple[object, ...]) -> Schema:
        if origin is tuple and args and args[-1] is not Ellipsis:
            items = [self.value(arg) for arg in args]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        each = self.value(args[0]) if args else {}
        return {"type": "array", "items": each} if each else {"type": "array"}

    def _free_mapping(self, args: tuple[object, ...]) -> Schema:
        schema: Schema = {"type": "object"}
        if not args:
            return schema
        if args[0] is int:
            schema["propertyNames"] = {"pattern": r"^\s*[-+]?[0-9][0-9_]*\s*$"}
        if get_origin(args[0]) is Literal:
            schema["propertyNames"] = {"enum": [str(choice) for choice in get_args(args[0])]}
        if each := self.value(args[1]):
            schema["additionalProperties"] = each
        return schema

    def _scalar(self, annotation: object, ranges: tuple[Range, ...]) -> list[Schema]:
        if annotation is bool:
            return [{"type": "boolean"}, {"$ref": "#/$defs/boolean_text"}]
        if annotation in (str, Path):
            return [{"type": "string"}]
        if annotation not in (int, float):
            return [{}]  # Any, or a class that only Python can check
        bounds: Schema = {}
        if annotation is float and not self._infinite and not any(mark.infinite for mark in ranges):
            bounds = {"minimum": -_LARGEST, "maximum": _LARGEST}
        for mark in ranges:
            given = {word: getattr(mark, name) for name, word in _BOUNDS.items()}
            bounds |= {word: bound for word, bound in given.items() if bound is not None}
        for closed, open_ in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if open_ in bounds:
                bounds.pop(closed, None)
        if annotation is int:
            return [{"type": "integer", **bounds}, {"$ref": "#/$defs/integer_text"}]
        return [{"type": "number", **bounds}, {"$ref": "#/$defs/number_text"}]


def _described(schema: Schema, text: str) -> Schema:
    return {"description": text, **schema} if text else schema


def _as_json(default: object) -> Any:
    """A field's default as JSON shows it; MISSING if it is infinite or a Python object."""
    try:
        return json.loads(json.dumps(to_python(from_python(default, "")), default=os.fspath, allow_nan=False))
    except (TypeError, ValueError):
        return dataclasses.MISSING
