"""Measuring time in the device's queue and memory of its allocator."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mm_core.device.kind import current_module, device_type

_CGROUP = Path("/sys/fs/cgroup")


class DeviceClock:
    """A clock of the device's queue, or of the wall on CPU; marking a moment does not wait."""

    def mark(self) -> Any:
        """Marks a moment in the device's queue; pass two of them to `seconds`."""
        if device_type() == "cpu":
            return time.perf_counter()
        event = current_module().Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """The seconds between two moments of the device's queue; waits until it reaches the second one."""
        if device_type() == "cpu":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000

    def passed(self, moment: Any) -> bool:
        """Whether the device's queue has reached a moment; does not wait."""
        return device_type() == "cpu" or bool(moment.query())


def copied_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begins to copy a tensor to the host behind what the device has in its queue; does not wait.

    Returns:
        A function that waits for the copy alone, and returns it.
    """
    if device_type() == "cpu":
        copy = tensor.clone()
        return lambda: copy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = current_module().Event()
    event.record()

    def read() -> Tensor:
        event.synchronize()
        return copy

    return read


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on the device; it comes through page-locked memory and waits for nothing."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def peak_memory_bytes() -> int:
    """Peak memory in bytes since the last reset: of the device's allocator, or of the process on CPU."""
    if device_type() != "cpu":
        return int(current_module().max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes() -> int | None:
    """Bytes of this rank's device that are free, or on CPU of its host; None: unknown."""
    return free_host_bytes() if device_type() == "cpu" else int(current_module().mem_get_info()[0])


def free_host_bytes() -> int | None:
    """Bytes of host memory that processes can take, at most the limit of a container; None: unknown."""
    found = None
    with suppress(OSError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8")
        found = 1024 * int(re.findall(r"MemAvailable:\s+(\d+)", lines)[0])
    files = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for names in files:
        with suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((_CGROUP / name).read_text(encoding="utf-8")) for name in names)
            found = limit - used if found is None else min(found, limit - used)
    return found


def reset_peak_memory() -> None:
    """Restarts the device's peak-memory measurement; on CPU the peak of a process cannot be reset."""
    if device_type() != "cpu":
        current_module().reset_peak_memory_stats()


class MemoryRecorder:
    """A recorder of the accelerator's memory allocations, for PyTorch's memory viewer."""

    def __init__(self, memory: ModuleType) -> None:
        self._memory = memory

    def start(self) -> None:
        """Starts recording the accelerator's memory allocations."""
        self._memory._record_memory_history(max_entries=100_000)

    def write(self, path: Path) -> None:
        """Writes the recorded memory allocations: a pickle file for PyTorch's memory viewer."""
        self._memory._dump_snapshot(str(path))

    def stop(self) -> None:
        """Stops recording the accelerator's memory allocations."""
        self._memory._record_memory_history(enabled=None)


def memory_recorder() -> MemoryRecorder | None:
    """A recorder of this device's memory allocations; None on CPU, or if its build of torch has none."""
    if device_type() == "cpu":
        return None
    memory = getattr(current_module(), "memory", None)
    return MemoryRecorder(memory) if memory and hasattr(memory, "_record_memory_history") else None
