"""`<run>/logs/rank_N.log`: what a rank writes to its standard streams, and its warnings, with times."""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


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


def current_log() -> RankLog | None:
    """The log of this process, while `rank_log` is open."""
    return _current[-1] if _current else None


class _Copied(io.TextIOBase):
    """A stream that also writes its whole lines to the log. What a terminal redraws is no line."""

    def __init__(self, stream: Any, log: RankLog) -> None:
        self._stream, self._log, self._rest = stream, log, ""

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if "\x1b" not in text and "\r" not in text:
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                self._log.write("\n".join(lines))
        return int(written if written is not None else len(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True


class _Handler(logging.Handler):
    """Logging records of which no other handler writes to the standard streams."""

    def __init__(self, log: RankLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(self.format(record))


@contextmanager
def rank_log(run_dir: Path, rank: int, world: int) -> Iterator[RankLog]:
    """Copies Python's standard streams, logging and warnings to the rank's log for the length of the block.

    A line at the start says when, where and as what the rank ran; resumed runs append.
    """
    log = RankLog(log_path(run_dir, rank))
    log.write(
        f"--- rank {rank} of {world}, pid {os.getpid()} on {socket.gethostname()}: {' '.join(sys.argv)}"
    )
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Copied(streams[0], log), _Copied(streams[1], log)
    handler = _Handler(log)
    logger = logging.getLogger()
    if logger.handlers:  # else Python's last resort writes to the copied stream already
        logger.addHandler(handler)
    _current.append(log)
    try:
        yield log
    except BaseException as error:
        log.write(f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        _current.remove(log)
        logger.removeHandler(handler)
        sys.stdout, sys.stderr = streams
        log.close()
