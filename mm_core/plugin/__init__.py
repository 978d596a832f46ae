"""Plugins: hooks, discovery, the registry of components, building them from configs, trust in others' code.

Importing this room starts no discovery: the names of `registry` are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names
from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import KINDS, hookimpl
from mm_core.schema.fields import ComponentConfig, DType, InputPath, Kind, Range, Resume

if TYPE_CHECKING:
    from mm_core.plugin.registry import PluginRecord, Registered, Registry, build, get_registry

__all__ = [
    "KINDS",
    "Component",
    "ComponentConfig",
    "DType",
    "InputPath",
    "Kind",
    "PluginRecord",
    "Range",
    "Registered",
    "Registry",
    "Resume",
    "build",
    "get_registry",
    "hookimpl",
]

__getattr__ = lazy_names(__name__)
