"""Engines: how a task is sharded over devices and stepped.

The names below are for plugins.
"""

from mm_core.engines.base import EngineBase
from mm_core.engines.fsdp2 import FSDP2Engine

__all__ = ["EngineBase", "FSDP2Engine"]
