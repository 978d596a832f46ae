"""One job at a time writes a run's folder."""

from __future__ import annotations

import errno
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
        try:
            # Never through a link: what the holder writes would go into the file that a stranger's run names.
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as fault:
            if fault.errno != errno.ELOOP:
                raise
            raise CheckpointError(
                "the lock of this run is a link", where=str(self._path), hint="remove it"
            ) from None
        file = os.fdopen(handle, "a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.readline(200).strip() or "another process"
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

    def renew(self) -> CheckpointError | None:
        """Takes the lock anew where the run's folder was removed under it; the sentence on that.

        Raises:
            CheckpointError: the folder is another run's now.
        """
        folder, before = self._path.parent, self._file
        if before is None:
            return None
        begun = (folder / "config.yaml").exists()
        try:
            if os.path.samestat(self._path.lstat(), os.fstat(before.fileno())):
                return None
        except FileNotFoundError:
            if begun:  # the lock alone was removed
                return None
        self._file = None
        try:
            self.take()
            if begun:
                self.release()
                raise CheckpointError(
                    "the run's folder was renamed while it trained, and another run has begun under its name",
                    where=str(folder),
                    hint="nothing was written to it; this run's checkpoints are where its folder is now",
                )
        except BaseException:
            self._file = before  # the next save is to find the same
            raise
        _held.remove(before)
        before.close()
        return CheckpointError(
            "the run's folder was removed or renamed while it trained",
            where=str(folder),
            hint="the last step was saved to a new folder of that name, and a resume goes on from there;"
            " earlier checkpoints, figures and logs are where the folder is now, if anywhere",
        )

    def release(self) -> None:
        """Frees the folder."""
        if self._file is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            _held.remove(self._file)
            self._file.close()
            self._file = None
