"""Checks plugins for `mm plugins check`, without importing torch where possible."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from mm_core.errors import ContractError, MMError, PluginError
from mm_core.plugin.checks.calls import call_fault
from mm_core.plugin.checks.contract import class_faults, hint_of, sentence
from mm_core.plugin.checks.places import place_of
from mm_core.plugin.checks.source import source_faults
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.records import PluginRecord, Registered, one_line
from mm_core.plugin.registry import Registry
from mm_core.schema.describe import describe_nested


@dataclass(frozen=True)
class Finding:
    """One problem of a plugin, found by `mm plugins check`."""

    severity: Literal["fault", "warning"]  # fault: something does not work
    plugin: str
    sentence: str


def inspect_plugins(registry: Registry, import_targets: bool = False) -> list[Finding]:
    """Checks every plugin: whether it loaded, its components' configs, whether their targets exist.

    Args:
        registry: the plugins.
        import_targets: import the targets, compare their signatures with their configs' fields, and check
            classes against the contract of their kind; otherwise targets are only looked up in files.
    """
    findings = []
    for plugin in registry.plugins:
        findings += [Finding("fault", plugin.namespace, s) for s in _faults(plugin, import_targets)]
        findings += [Finding("warning", plugin.namespace, s) for s in _warnings(plugin)]
    return findings


def _warnings(plugin: PluginRecord) -> Iterator[str]:
    if plugin.status == "disabled" or plugin.file is not None:
        return
    if plugin.imports_torch:
        yield f"{plugin.label} imports torch when it is loaded: import torch only in the target's module"
    if plugin.requirement is None and plugin.namespace != "core":
        yield (
            f"{plugin.label} does not declare which versions of mm-core it works with: "
            "add 'mm-core>=0.1,<0.2' to its dependencies"
        )


def _faults(plugin: PluginRecord, import_targets: bool) -> Iterator[str]:
    if plugin.broken:
        yield f"{plugin.label} {plugin.status}: {plugin.error}"
    for registered in plugin.components:
        yield from component_faults(registered, import_targets)


def component_faults(registered: Registered, import_targets: bool = False) -> list[str]:
    """The errors of one component, one text each (see `inspect_plugins`)."""
    faults = [*_config_faults(registered)]
    try:
        fault = file_fault(registered)
        if import_targets and isinstance(fault, PluginError):
            fault = None  # the import decides whether the target exists
        faults += [one_line(fault)] if fault else []
        if import_targets:
            faults += _import_faults(registered, judged=fault is not None)
    except MMError as error:
        faults.append(one_line(error))
    return faults


def _config_faults(registered: Registered) -> Iterator[str]:
    if registered.component.config is None:
        return
    torch_before = "torch" in sys.modules
    try:
        describe_nested(registered.config_class())
    except MMError as error:
        yield one_line(error) if error.where else f"{registered.place}: {one_line(error)}"
    except Exception as error:  # defaults are plugin code: they may raise anything
        path = registered.component.config
        yield f"{registered.place}: the fields of {path!r} cannot be read: {one_line(error)}"
    if "torch" in sys.modules and not torch_before and not registered.modules:
        yield (
            f"{registered.place}: the config {registered.component.config!r} imports torch, "
            "which makes every check of a config slow: do not import torch there"
        )


def file_fault(registered: Registered) -> MMError | None:
    """What is wrong with a component's target, judging by files alone: it is missing, or lacks members."""
    path = registered.component.target
    if missing := registered.path_fault("target", path):
        return missing
    name = path.partition(":")[2]
    place, faults = source_faults(registered.kind, registered.module_of(path), name)
    if not faults:
        return None
    return ContractError(
        sentence(name, faults), where=f"{registered.short_place}, {place}", hint=hint_of(registered.kind)
    )


def _import_faults(registered: Registered, judged: bool) -> Iterator[str]:
    """What importing the target shows; what its class lacks only if the files have not shown it already."""
    target = registered.load_target()
    if not judged and isinstance(target, type) and (faults := class_faults(registered.kind, target)):
        place = place_of(target, target)
        yield f"{registered.place}: {sentence(target.__name__, faults)} ({place}; {hint_of(registered.kind)})"
    if registered.component.config is None:
        registered.config_class()
        return
    leading = [None] * COMPONENT_KINDS[registered.kind].leading
    names = dict.fromkeys(field.name for field in fields(registered.config_class()))
    if fault := call_fault(target, leading, names):
        yield (
            f"{registered.place}: the target {registered.component.target!r} does not accept the fields of "
            f"{registered.component.config!r}: {fault[1]}"
        )
