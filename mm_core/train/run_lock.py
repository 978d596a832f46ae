"""One job at a time writes a run's folder."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mm_core.errors import CheckpointError

_held: list[TextIO] = []


def _let_go() -> None:
    """In a forked child, a data worker: what it holds open would keep the folder locked after its parent."""
    for file in _held:
        with suppress(OSError):
            os.close(file.fileno())
    _held.clear()  # the number may soon be another file's, which a child of this one must not close


os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """A lock on `<run_dir>/.lock`, free again when its process ends, however it ends.

    On a file system without locks it holds nobody up.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".lock"
        self._file: TextIO | None = None

    def take(self) -> None:
        """CheckpointError that names the holder, where another process has it."""
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise CheckpointError(
                f"this run is being trained by {holder}",
                where=str(self._path.parent),
                hint="wait for it or stop it, or choose another run.name",
            ) from None
        except OSError:
            pass
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        _held.append(file)

    def release(self) -> None:
        """Frees the folder."""
        if self._file is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            _held.remove(self._file)
            self._file.close()
            self._file = None
