"""Builds components from checked references: nested components first, then the target is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mm_core.errors import ConfigError, ContractError, foreign_code
from mm_core.plugin.checks.calls import call_fault
from mm_core.plugin.checks.contract import check_object
from mm_core.schema.fields import ComponentConfig
from mm_core.schema.nodes import rebuilt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from mm_core.plugin.records import Components


def build_component(config: ComponentConfig, registry: Components, args: tuple[object, ...] = ()) -> Any:
    """Builds the component that a checked reference names.

    Args:
        config: the reference.
        registry: the plugins that provide components.
        args: arguments that the core passes by position (see hookspecs).

    Raises:
        ContractError: the target does not accept the config's fields, or what it returns does not keep the
            contract of its kind.
    """
    built = call_target(config, registry, args)
    registered = registry.resolve(config.kind, config.type)
    check_object(config.kind, built, registered.load_target(), registered.short_place)
    return built


def call_target(
    config: ComponentConfig,
    registry: Components,
    args: tuple[object, ...] = (),
    more: Mapping[str, object] = MappingProxyType({}),
) -> Any:
    """Builds a component without checking it against the contract of its kind.

    Args:
        config: the reference.
        registry: the plugins that provide components.
        args: arguments that the core passes by position.
        more: arguments that the core passes by keyword.
    """
    registered = registry.resolve(config.kind, config.type)
    fields = {**built_fields(config, registry), **more}
    target = registered.load_target()
    # Errors raised by the target itself stay unchanged: they are bugs to be seen, or its own messages.
    if (fault := call_fault(target, args, fields)) is not None:
        raise ContractError(
            f"the target cannot be called with its config's fields: {fault[1]}",
            where=registered.short_place,
            accepted=f"{getattr(target, '__name__', target)}{fault[0]}",
            hint="the fields of config= and the parameters of target= must have the same names",
        ) from fault[1]
    with foreign_code():  # a target that calls sys.exit(0) would end a run as if it had succeeded
        return target(*args, **fields)


def built_fields(config: ComponentConfig, registry: Components) -> dict[str, object]:
    """The fields of a component's config, with defaults filled in and nested components built."""
    registered = registry.resolve(config.kind, config.type)
    options = dict(config.options)
    if registered.component.config is not None:  # without one, the target holds its own defaults
        filled = _filled(options, registered.config_class(), f"{config.kind} {registered.qualified!r}")
        options = {f.name: getattr(filled, f.name) for f in dataclasses.fields(filled) if f.init}
    return {name: _built(value, registry) for name, value in options.items()}


def _filled(options: dict[str, object], cls: type[DataclassInstance], where: str) -> DataclassInstance:
    """The config with its defaults, also of a reference that was written in Python without all options."""
    make: Callable[..., DataclassInstance] = cls
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        hint = "correct the options of this ComponentConfig"
        accepted = ", ".join(f.name for f in dataclasses.fields(cls)) or "no keys"
        raise ConfigError(str(error), where=where, accepted=accepted, hint=hint) from None


def _built(value: object, registry: Components) -> object:
    """`value` with every ComponentConfig in it built, also within tuples, lists, mappings and dataclasses."""
    if isinstance(value, ComponentConfig):
        return build_component(value, registry)
    if isinstance(value, Mapping):
        return {key: _built(item, registry) for key, item in value.items()}
    return rebuilt(value, lambda item, key: _built(item, registry))
