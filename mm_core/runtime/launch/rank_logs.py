"""`<run>/logs/rank_N.log`: what a rank writes to its standard streams, and its warnings, with times."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mm_core.runtime.launch.launch_folder import LaunchFolder
from mm_core.runtime.output import BestEffort

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""What colours text and moves a terminal's cursor."""


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's log lies."""
    return Path(run_dir) / "logs" / f"rank_{rank}.log"


class RankLog:
    """A file that is appended to line by line. A full disk loses lines, never a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)

    def write(self, text: str) -> None:
        """Appends whole lines, each with the time."""
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError, ValueError):
            self._file.write("".join(f"{stamp} {line}\n" for line in text.splitlines() if line.strip()))

    @property
    def descriptor(self) -> int | None:
        """For what writes past Python, such as faulthandler."""
        return None if self._file is None else self._file.fileno()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


_current: list[RankLog] = []
_latest: list[Path] = []


def current_log() -> RankLog | None:
    """The log of this process, while `rank_log` is open."""
    return _current[-1] if _current else None


def latest_log() -> Path | None:
    """Where this process has last kept a log, open or not: what its error points to."""
    return _latest[-1] if _latest else None


class _Copied(BestEffort):
    """A stream that also writes its whole lines to the log, as a terminal shows them in the end: of what is
    drawn over itself, such as a progress bar, the last, and without colours."""

    def __init__(self, stream: TextIO | None, log: RankLog) -> None:
        super().__init__(open(os.devnull, "w") if stream is None else stream)  # noqa: SIM115, PTH123 - closed
        self._log, self._rest = log, ""

    def write(self, text: str) -> int:
        super().write(text)
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :]
        if lines:
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
            self._log.write(_ESCAPES.sub("", "\n".join(shown)))
        return len(text)


@contextmanager
def rank_log(run_dir: Path, rank: int, world: int) -> Iterator[RankLog]:
    """Copies Python's standard streams, logging and warnings to the rank's log for the length of the block.

    A line at the start says when, where and as what the rank ran; resumed runs append. An error that ends
    the block is there with its traceback, also where the rank is silent about it.
    """
    log = RankLog(log_path(run_dir, rank))
    if log.descriptor is not None:
        _latest[:] = [log.path]
    log.write(
        f"--- rank {rank} of {world}, pid {os.getpid()} on {socket.gethostname()}: {' '.join(sys.argv)}"
    )
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Copied(streams[0], log), _Copied(streams[1], log)
    handler = logging.StreamHandler(log)
    logger = logging.getLogger()
    if logger.handlers:  # else Python's last resort writes to the copied stream already
        logger.addHandler(handler)
    _current.append(log)
    try:
        with _crashes(log, rank):
            yield log
    except BaseException as error:
        log.write(f"ended by {type(error).__name__}: {error}")
        log.write("".join(traceback.format_exception(error)))
        raise
    finally:
        _current.remove(log)
        logger.removeHandler(handler)
        sys.stdout, sys.stderr = streams
        log.close()


@contextmanager
def _crashes(log: RankLog, rank: int) -> Iterator[None]:
    """Has a crash in native code leave its stacks in the log, where a launcher will say where that lies."""
    folder = LaunchFolder.current()
    with ExitStack() as after:
        if folder.has_parent and log.descriptor is not None and faulthandler.is_enabled():
            folder.note_log(rank, log.path)
            faulthandler.enable(log.descriptor)
            after.callback(_crashes_to_stderr)
        yield


def _crashes_to_stderr() -> None:
    with suppress(OSError, ValueError, RuntimeError, AttributeError):  # it may have no descriptor
        faulthandler.enable(sys.__stderr__ or sys.stderr)
