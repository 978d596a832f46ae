"""Rank logs (`<run>/logs/rank_N.log`): a rank's standard output, standard error and warnings, with times."""

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
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from mm_core.files import open_append
from mm_core.runtime.launch.launch_folder import LaunchFolder
from mm_core.runtime.output import BestEffort

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Escape sequences that colour text or move a terminal's cursor."""


def log_path(run_dir: Path, rank: int) -> Path:
    """The path of a rank's log."""
    return Path(run_dir) / "logs" / f"rank_{rank}.log"


class RankLog:
    """The log file of a rank, appended to line by line; a full disk loses lines but does not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = TextIOWrapper(open_append(path), "utf-8", "replace", line_buffering=True)

    def write(self, text: str) -> None:
        """Appends lines to the rank's log, each with the time."""
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError, ValueError):
            self._file.write("".join(f"{stamp} {line}\n" for line in text.splitlines() if line.strip()))

    @property
    def descriptor(self) -> int | None:
        """File descriptor of the rank's log, for faulthandler; None if the file could not be opened."""
        return None if self._file is None else self._file.fileno()

    def close(self) -> None:
        """Closes the rank's log."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


_current: list[RankLog] = []
_latest: list[Path] = []


def current_log() -> RankLog | None:
    """The log of this rank while `rank_log` is active; None otherwise."""
    return _current[-1] if _current else None


def latest_log() -> Path | None:
    """The path of this rank's last log, open or closed, to print with its error."""
    return _latest[-1] if _latest else None


class _Copied(BestEffort):
    """A stream that also writes its complete lines to the log, without colours. Of a line that is drawn
    repeatedly, such as a progress bar, only the last state is written."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        super().__init__(stream)
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
    """Copies Python's standard streams, logging and warnings to the rank's log for the duration of the block.

    The first line contains the time, process, host and command; resumed runs append. An error that ends the
    block is logged with its traceback, even if the rank does not print it.

    Args:
        run_dir: the run's folder.
        rank: this process.
        world: number of ranks.
    """
    log = RankLog(log_path(run_dir, rank))
    if log.descriptor is not None:
        _latest[:] = [log.path]
    log.write(
        f"--- rank {rank} of {world}, pid {os.getpid()} on {socket.gethostname()}: {' '.join(sys.argv)}"
    )
    streams = sys.stdout, sys.stderr
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for streams that are closed; itself closed below
    sys.stdout, sys.stderr = (_Copied(stream or nowhere, log) for stream in streams)
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
        nowhere.close()
        log.close()


@contextmanager
def _crashes(log: RankLog, rank: int) -> Iterator[None]:
    """Writes the stacks of a crash in native code to the log, if a launcher will print the log's path."""
    folder = LaunchFolder.current()
    with ExitStack() as after:
        if folder.has_parent and log.descriptor is not None and faulthandler.is_enabled():
            folder.note_log(rank, log.path)
            faulthandler.enable(log.descriptor)
            after.callback(_crashes_to_stderr)
        yield


def _crashes_to_stderr() -> None:
    with suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr may have no descriptor
        faulthandler.enable(sys.__stderr__ or sys.stderr)
