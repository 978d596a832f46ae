"""The processes of a run: ranks, their groups and meshes, agreement, launching, signals, watchdog, output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.runtime.launch.signals import StopFlag

__all__ = ["StopFlag"]

__getattr__ = lazy_names(__name__)
