"""Time in the device's queue, and the memory of its allocator."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_core.device.kind import current_module, device_type


class DeviceClock:
    """Moments in the device's queue, or on the wall where there is none: marking one waits for nothing."""

    def mark(self) -> Any:
        """A moment."""
        if device_type() == "cpu":
            return time.perf_counter()
        event = current_module().Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """Between two moments; waits until the device has reached the second."""
        if device_type() == "cpu":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000


def peak_memory_bytes() -> int:
    """Most memory held at once since the last reset: the device's allocator, or the process on CPU."""
    if device_type() != "cpu":
        return int(current_module().max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> None:
    """`peak_memory_bytes` counts from here on; a process on CPU cannot forget."""
    if device_type() != "cpu":
        current_module().reset_peak_memory_stats()


class MemoryRecorder:
    """Records what the accelerator's allocator does, for PyTorch's memory viewer."""

    def __init__(self, memory: ModuleType) -> None:
        self._memory = memory

    def start(self) -> None:
        """Begins to record."""
        self._memory._record_memory_history(max_entries=100_000)

    def write(self, path: Path) -> None:
        """Writes what was recorded: a pickle that the viewer reads."""
        self._memory._dump_snapshot(str(path))

    def stop(self) -> None:
        """Ends the recording."""
        self._memory._record_memory_history(enabled=None)


def memory_recorder() -> MemoryRecorder | None:
    """The recorder of this device's allocator; None on CPU, or where its build of torch has none."""
    if device_type() == "cpu":
        return None
    memory = getattr(current_module(), "memory", None)
    return MemoryRecorder(memory) if memory and hasattr(memory, "_record_memory_history") else None
