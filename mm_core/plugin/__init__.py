"""Plugins: hooks, discovery, the registry of components, building them from configs, trust in others' code.

Importing this room starts no discovery: the names of `registry` are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import KINDS, hookimpl
from mm_core.schema.fields import ComponentConfig, DType, Kind, Range

if TYPE_CHECKING:
    from mm_core.plugin.registry import PluginRecord, Registered, Registry, build, get_registry

__all__ = [
    "KINDS",
    "Component",
    "ComponentConfig",
    "DType",
    "Kind",
    "PluginRecord",
    "Range",
    "Registered",
    "Registry",
    "build",
    "get_registry",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mm_core.plugin' has no attribute {name!r}")
    return getattr(import_module("mm_core.plugin.registry"), name)
