"""The lock on a run's folder: only one job at a time may write to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from mm_core.errors import CheckpointError

_held: list[int] = []
"""Descriptors of the lock files that this process holds until it ends."""


def _close_in_child() -> None:
    """In a forked child (a data worker): the open file would keep the folder locked after its parent ends."""
    for held in _held:
        with suppress(OSError):
            os.close(held)
    _held.clear()  # the number may soon be another file's, which a child of this one must not close


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """A lock on a run's folder (`<run_dir>/.lock`), released when its process ends, however it ends.

    On a file system without locks it has no effect.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".lock"
        self._file: int | None = None

    def take(self) -> None:
        """Locks the run's folder; CheckpointError that names the holder if another process has the lock."""
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Never through a link: a stranger's run could point it at any file, which would be overwritten.
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as fault:
            if fault.errno != errno.ELOOP:
                raise
            raise CheckpointError(
                "the lock file of this run is a symbolic link",
                where=str(self._path),
                hint="remove the link, then start the run again",
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").partition("\n")[0].strip()
            os.close(file)
            raise CheckpointError(
                f"this run is being trained by {holder or 'another process'}",
                where=str(self._path.parent),
                hint="wait for it or stop it, or choose another run.name",
            ) from None
        except OSError:
            pass
        self._file = file
        _held.append(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4().hex}\n".encode())
        with suppress(OSError):
            os.fsync(file)  # other hosts read it

    def read(self) -> str:
        """What the holder of the lock has written into its file; empty if there is none."""
        with suppress(OSError):
            return self._path.read_text(errors="replace")
        return ""

    def check_shared(self, holder: str, seconds: float = 90.0) -> None:
        """Waits until this host's file names the holder, as a shared folder may have it late.

        Raises:
            CheckpointError: it does not, so that the hosts have a folder each.
        """
        end = time.monotonic() + seconds
        while holder and self.read() != holder:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{socket.gethostname()} does not see what rank 0 has written into the run's folder",
                    where=str(self._path.parent),
                    hint="set run.dir to a folder on a file system that all nodes share",
                )
            time.sleep(0.2)

    def renew(self) -> CheckpointError | None:
        """Locks the run's folder again if it was removed during training; returns an error to report later.

        None if the folder is still there.

        Raises:
            CheckpointError: another run has taken the folder's name.
        """
        folder, before = self._path.parent, self._file
        if before is None:
            return None
        begun = (folder / "config.yaml").exists()
        try:
            if os.path.samestat(self._path.lstat(), os.fstat(before)):
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
                    "the run's folder was renamed during training, and another run has started in its place",
                    where=str(folder),
                    hint="resume from the renamed folder: it has this run's checkpoints",
                )
        except BaseException:
            self._file = before  # the next save must find the same state
            raise
        _held.remove(before)
        os.close(before)
        return CheckpointError(
            "the run's folder was removed or renamed during training",
            where=str(folder),
            hint="the last step was saved to a new folder of that name: run the command again to resume from"
            " it; earlier checkpoints, metrics and logs are in the renamed folder, if it still exists",
        )

    def release(self) -> None:
        """Unlocks the run's folder."""
        if self._file is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            _held.remove(self._file)
            os.close(self._file)
            self._file = None
