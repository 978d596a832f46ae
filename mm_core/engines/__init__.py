"""Engines: how a task is sharded over devices and stepped.

The name below is for plugins.
"""

from mm_core.engines.base import EngineBase

__all__ = ["EngineBase"]
