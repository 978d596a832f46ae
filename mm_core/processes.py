"""Whether a process runs, and which one it is: ids are given again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody has asked after does not: what runs as
    process 1 of a container seldom asks."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = _stat(pid)
    return not state or state[0] not in ("Z", "X")


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks: tells it from another one of the same id."""
    state = _stat(pid)
    return state[19] if state else "0"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; [] where there are none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
