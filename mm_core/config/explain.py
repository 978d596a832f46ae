"""What a key of a config means: type, default, value and where it was written, for `mm config explain`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from mm_core.config.dump import plain, texts_of
from mm_core.config.sections import RunConfig
from mm_core.errors import ConfigError, MMError, PluginError, article, did_you_mean
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.records import Registered
from mm_core.plugin.registry import Registry
from mm_core.schema.describe import FieldInfo, KeyInfo, describe_keys, summary_of, type_text
from mm_core.schema.fields import ComponentConfig, Kind
from mm_core.schema.nodes import Node, describe, inside, is_list, unwrap

_INCLUDE = KeyInfo(
    FieldInfo(
        "include",
        "str or list of str",
        "[]",
        "other files, relative to this one, or `config:NAME` of a plugin; merged first",
    ),
    str | tuple[str, ...],
    (),
    (),
)


class _Unknown:
    """The value of a place that no config has."""


_UNKNOWN: Final = _Unknown()


@dataclass(frozen=True)
class Explanation:
    """The explanation of one key.

    Attributes:
        key: its path, or its path within a component.
        owner: the component that has the key, e.g. `predictor custom_dit/custom_dit`; empty for other keys.
        type: the type in words.
        accepted: the accepted values in words; of a component, the names.
        default: the default as a YAML would write it; None: the key is required; empty: a component itself,
            which has none.
        doc: what the key sets.
        value: the value in the config, plain as in a YAML.
        origin: `file:line`, `override ...` or `default`; None without a config, or where it has no value.
        keys: the keys below.
    """

    key: str
    owner: str
    type: str
    accepted: str
    default: str | None
    doc: str
    value: object = None
    origin: str | None = None
    keys: tuple[Explanation, ...] = ()


@dataclass(frozen=True)
class _Place:
    """A place in a config on the way to a key: what may stand there, and what does."""

    path: str
    hint: object
    field: FieldInfo
    default: object = None  # of interest where it is a component
    owner: str = ""
    aliases: tuple[str, ...] = ()
    value: object = _UNKNOWN
    node: Node | None = None  # None: nobody has written the value


def explain(
    key: str, registry: Registry, loaded: tuple[RunConfig, Node] | None = None
) -> tuple[Explanation, ...]:
    """Explains a key of a run's config, or of a component.

    Args:
        key: the path of a key (`train.steps`, `task.predictor.ffn_dim`); empty: the config itself; or a
            component's name as in `mm plugins show`, with a kind before it or not, and a key of it
            (`custom_dit/custom_dit.ffn_dim`, `predictor/custom_dit.ffn_dim`).
        registry: the plugins that provide components.
        loaded: a config and its tree, as `load_with_places` returns them.

    Returns:
        One explanation; several for a component's name that several kinds or plugins have, and without a
        config for a key of several components (`task.predictor.ffn_dim`).

    Raises:
        ConfigError: there is no such key, or it depends on a type that is not known.
        PluginError: there is no such component.
    """
    explainer = _Explainer(registry, texts_of(loaded[0]) if loaded else {})
    root = _Place("", RunConfig, FieldInfo("", "", None, ""))
    if loaded is not None:
        root = replace(root, value=loaded[0], node=loaded[1])
    steps = key.split(".") if key else []
    if not steps or steps[0] in explainer.children(root) or not (starts := explainer.components(key)):
        return tuple(map(explainer.explained, explainer.all_at(root, steps)))
    found: list[_Place] = []
    faults = []
    for start, rest in starts:
        try:
            found += explainer.all_at(start, rest)
        except ConfigError as fault:
            faults.append(fault)
    if not found:
        raise faults[0]
    return tuple(map(explainer.explained, found))


class _Explainer:
    def __init__(self, registry: Registry, literals: Mapping[str, str]) -> None:
        self.registry, self.literals = registry, literals

    def components(self, key: str) -> list[tuple[_Place, list[str]]]:
        """The components whose name a key starts with, and the steps that remain. Names may contain dots."""
        steps = key.split(".")
        for count in range(len(steps), 0, -1):
            name = ".".join(steps[:count])
            if found := self._named(name):
                return [(_component_place(each), steps[count:]) for each in found]
        if "/" in key:
            self.registry.find(steps[0])  # raises the error that names similar components
        return []

    def _named(self, name: str) -> tuple[Registered, ...]:
        kind, _, rest = name.partition("/")
        try:
            if kind in KINDS and rest:
                return (self.registry.resolve(kind, rest),)
            return self.registry.find(name)
        except PluginError:
            return ()

    def all_at(self, place: _Place, steps: list[str]) -> list[_Place]:
        """The places at a path of keys: one for each installed component where nothing has chosen one."""
        for number, step in enumerate(steps):
            kind = _kind_at(place)
            if kind and step != "type" and place.value is _UNKNOWN and self._chosen(place, kind) is None:
                found = []
                for each in self.registry.components(kind):
                    chosen = replace(place, default=ComponentConfig(kind, each.qualified))
                    try:
                        found += self.all_at(chosen, steps[number:])
                    except MMError:
                        continue  # it has no such key, or its plugin is broken
                if not found:
                    raise self._not_chosen(place, kind, step)
                return found
            place = self._step(place, step)
        return [place]

    def _step(self, place: _Place, step: str) -> _Place:
        """The place at a key, or number, below another one."""
        children = self.children(place)
        key = next((key for key, child in children.items() if step in child.aliases), step)
        if found := children.get(key) or _item(place, key):
            return found
        if key == "type" and (kind := _kind_at(place)):
            return self._type_place(place, kind, None)
        raise self._no_key(place, step, children)

    def explained(self, place: _Place, inner: bool = True) -> Explanation:
        """The explanation of a place.

        Args:
            place: the place.
            inner: whether it contains the keys below the place.
        """
        known = place.value is not _UNKNOWN
        where = place.node
        written = where.path if where is not None else place.path
        children = self.children(place) if inner else {}
        return Explanation(
            key=place.path,
            owner=place.owner,
            type=place.field.type,
            accepted=self._accepted(place.hint),
            default=place.field.default,
            doc=place.field.comment or self._summary(place),
            value=plain(place.value, written, self.literals) if known else None,
            origin=_origin(where) if known else None,
            keys=tuple(self.explained(child, inner=False) for child in children.values()),
        )

    def children(self, place: _Place) -> dict[str, _Place]:
        """The places at the keys of a mapping, section or component; {} for any other value."""
        found: dict[str, _Place] = {}
        for option in _options(place.hint, place.value):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                found |= _section(place, describe_keys(option), "")
            elif (kind := _kind(option)) and (chosen := self._chosen(place, kind)):
                found["type"] = self._type_place(place, kind, chosen)
                found |= _section(place, describe_keys(chosen.config_class()), found["type"].owner)
        return found

    def _chosen(self, place: _Place, kind: str) -> Registered | None:
        """The component that the config, or else the default, chooses at a place."""
        for value in (place.value, place.default):
            if isinstance(value, ComponentConfig):
                return self.registry.resolve(kind, value.type)
        return None

    def _type_place(self, place: _Place, kind: str, chosen: Registered | None) -> _Place:
        """The place of the key `type` of a component, which nothing may have chosen."""
        default = place.default.type if isinstance(place.default, ComponentConfig) else None
        doc = chosen.component.summary if chosen else f"the {kind.replace('_', ' ')}, by its name"
        info = FieldInfo("type", f"name of {kind}", default, doc)
        names = Literal.__getitem__(tuple(self._names(kind)))
        found = _below(place, "type", names, info, f"{kind} {chosen.qualified}" if chosen else "")
        bare = place.node is not None and not isinstance(place.node.value, dict)
        return replace(found, node=place.node) if bare else found

    def _names(self, kind: str) -> list[str]:
        return sorted(found.qualified for found in self.registry.components(kind))

    def _no_key(self, place: _Place, step: str, children: Mapping[str, _Place]) -> ConfigError:
        where = place.path or None
        options = list(_options(place.hint, place.value))
        if children:
            names = [*children]
            owner = children[names[0]].owner
            what = f"{owner} has no key {step!r}" if owner else f"unknown key {step!r}"
            further = [] if place.path else [name for c in self.registry.components() for name in c.names]
            hint = did_you_mean(step, [*names, *further])
            return ConfigError(what, where=where, accepted=", ".join(names), hint=hint)
        if kind := _kind_at(place):
            return self._not_chosen(place, kind, step)
        if any(map(is_list, options)):
            what = f"this is {article(place.field.type)}: name one item by its number"
            return ConfigError(what, where=where, accepted=f"{place.path}.0, {place.path}.1, ...")
        what = f"this is a single value ({place.field.type}), which has no keys"
        return ConfigError(what, where=where, hint=f"ask for {place.path}" if place.path else None)

    def _not_chosen(self, place: _Place, kind: str, step: str) -> ConfigError:
        names = self._names(kind)
        having = [found.qualified for found in self.registry.components(kind) if _has_key(found, step)]
        ask = f"`mm config explain {(having or names or [kind])[0]}.{step}`"
        state = "no config is named" if place.value is _UNKNOWN else "the config does not set it"
        return ConfigError(
            f"the keys depend on the type of this {kind.replace('_', ' ')}, and {state}",
            where=place.path,
            accepted=f"type: {', '.join(names)}"
            if names
            else f"nothing: no installed plugin provides a {kind}",
            hint=f"name a config that chooses the type (--config FILE), or ask for a component's key: {ask}",
        )

    def _accepted(self, hint: object) -> str:
        if kind := _kind(unwrap(hint)):
            return ", ".join(self._names(kind))
        return describe(hint) if hint is not RunConfig else ""

    def _summary(self, place: _Place) -> str:
        """The docstring of a section, or the summary of the component, where a key has no comment."""
        for option in _options(place.hint, place.value):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                return summary_of(option)
            if (kind := _kind(option)) and (chosen := self._chosen(place, kind)):
                return chosen.component.summary
        return ""


def _component_place(found: Registered) -> _Place:
    hint = Annotated[ComponentConfig, Kind(found.kind)]
    info = FieldInfo("", found.kind, "", found.component.summary)
    return _Place(found.qualified, hint, info, default=ComponentConfig(found.kind, found.qualified))


def _section(place: _Place, keys: Mapping[str, KeyInfo], owner: str) -> dict[str, _Place]:
    """The places at the keys of a section or component."""
    if place.hint is RunConfig:
        keys = {**keys, "include": _INCLUDE}
    return {
        key: _below(place, key, info.hint, info.field, owner, info.default, info.aliases)
        for key, info in keys.items()
    }


def _item(place: _Place, step: str) -> _Place | None:
    """The place of a list's item, or at a key of a mapping that takes any key; None for other values."""
    for option in _options(place.hint, place.value):
        args = get_args(option)
        if is_list(option) and step.isdigit():
            fixed = get_origin(option) is tuple and args[-1:] != (Ellipsis,)
            if fixed and int(step) >= len(args):
                return None
            hint = args[int(step)] if fixed else args[0] if args else Any
        elif get_origin(option) in (dict, Mapping):
            hint = args[1] if args else Any
        else:
            continue
        return _below(place, step, hint, FieldInfo(step, type_text(hint), None, place.field.comment))
    return None


def _below(
    place: _Place,
    key: str,
    hint: object,
    info: FieldInfo,
    owner: str = "",
    default: object = None,
    aliases: tuple[str, ...] = (),
) -> _Place:
    """The place at a key, or number, below another one, with its value and node if the config has it."""
    written = _entries(place.node.value if place.node is not None else None)
    node = next((written[name] for name in (key, *aliases) if name in written), None)
    value = _entries(inside(place.value)).get(key, _UNKNOWN)
    path = f"{place.path}.{key}" if place.path else key
    return _Place(path, hint, info, default, owner, aliases, value, node)


def _entries(held: object) -> Mapping[str, Any]:
    """What a mapping or list has, by key or number."""
    if isinstance(held, list):
        return {str(number): each for number, each in enumerate(held)}
    return held if isinstance(held, dict) else {}


def _options(hint: object, value: object) -> Iterator[object]:
    """The alternatives of a type annotation without null; only those that a known value has chosen."""
    hint = unwrap(hint)
    if get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from _options(option, value)
        return
    if hint is types.NoneType or (isinstance(value, ComponentConfig) and not _kind(hint)):
        return
    own = dataclasses.is_dataclass(value) and not isinstance(value, ComponentConfig)
    if not own or hint is type(value):
        yield hint


def _kind(hint: object) -> str | None:
    """The kind of the component that a type annotation accepts."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark.name for mark in marks if isinstance(mark, Kind)), None)


def _kind_at(place: _Place) -> str | None:
    """The kind of the component that may be at a place."""
    return next(filter(None, map(_kind, _options(place.hint, place.value))), None)


def _has_key(found: Registered, key: str) -> bool:
    try:
        return found.component.config is not None and key in describe_keys(found.config_class())
    except MMError:
        return False


def _origin(node: Node | None) -> str:
    if node is None:
        return "default"
    inside = isinstance(node.value, (dict, list))
    return (node.key_where or node.where) if inside else node.where
