"""Whether a process is running, and which process it is, since process ids are reused."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process with this id is running.

    A zombie counts as ended: process 1 of a container seldom collects the exit status of orphans.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = _stat(pid)
    return not state or state[0] not in ("Z", "X")


def started(pid: int) -> str:
    """The start time of a process in kernel clock ticks: distinguishes two processes with the same id."""
    state = _stat(pid)
    return state[19] if state else "0"


def running_seconds() -> float:
    """Seconds since this process was started; 0 if it is not known."""
    ticks = int(started(os.getpid()))
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def usable_cores() -> int:
    """Cores that this process may use, where the system limits them; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreWaits:
    """Reads how many seconds the thread that makes it has waited for a core, which other threads had; 0 where
    the system does not count them."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def __call__(self) -> float:
        with suppress(OSError, IndexError):
            return int(os.pread(self._file, 99, 0).split()[1]) / 1e9 if self._file is not None else 0.0
        return 0.0


def descendants(pid: int) -> list[int]:
    """The ids of all running processes that a process has started, and that those have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if state := _stat(int(path.name)):
            children.setdefault(int(state[1]), []).append(int(path.name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process name; [] if it cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
