"""A folder shared by the ranks of one launch on one host: which run, which failed, which prints the error."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mm_core.processes import running_seconds, started
from mm_core.runtime.leftovers import clear_after, lives, note_process

LAUNCH_DIR = "MM_LAUNCH_DIR"
"""Environment variable with the folder that mm-train created for its ranks."""

FAILED, LOST, ENDED, STOPPED_EARLY = "failed", "lost", "ended", "stopped"
"""Names of marks. FAILED: a rank printed its error. LOST: a rank lost its peers and printed nothing. ENDED: a
rank exited with its own code and without a message. STOPPED_EARLY: the run saved and stopped on request."""


class LaunchFolder:
    """Marks and process ids of the ranks of one launch on this host, as files in a folder.

    Without a path (a single process, or a folder owned by another user) every rank is on its own: it always
    prints its error, and sees no other ranks.

    Args:
        path: the folder, or None.
        has_parent: whether mm-train watches the folder and prints errors that ranks cannot print.
    """

    def __init__(self, path: Path | None, has_parent: bool = False) -> None:
        self.path, self.has_parent = path, has_parent

    @classmethod
    def current(cls) -> LaunchFolder:
        """The launch folder of this rank: mm-train's or, under another launcher, one of its own making.

        torchrun's agent starts ranks several times, and their environment is the same in two starts:
        it counts only its own failures. But it makes a new folder for the error files of each start.
        """
        if own := os.environ.get(LAUNCH_DIR):
            return cls(Path(own), has_parent=True)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls(None)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            folder = Path(error_file).parents[1] / "mm_core"
        else:
            names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
            parts = [os.getppid(), started(os.getppid()), *(os.environ.get(name, "0") for name in names)]
            name = "-".join("".join(c for c in str(part) if c.isalnum()) for part in parts)
            folder = Path(tempfile.gettempdir()) / f"mm_core-{os.getuid()}-{name}"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return cls(folder)
        return cls(None)

    def open(self) -> None:
        """Records this process as the launcher of the ranks."""
        if self.path is not None:
            note_process(self.path / "launcher.pid", os.getpid())

    def enter(self, rank: int) -> None:
        """Records this process as a rank of the launch.

        Args:
            rank: the rank's number on this host.
        """
        if self.path is None:
            return
        if not self.has_parent:
            _forget_earlier(self.path)
        with suppress(OSError):  # the rest of the launch may have removed the folder already
            note_process(self.path / f"rank_{rank}.pid", os.getpid())
            if not self.has_parent:
                note_process(self.path / "launcher.pid", os.getppid())
        clear_after(self.path)

    def depart(self, rank: int) -> None:
        """Removes the record of this rank, which ends normally.

        The last rank removes the folder if no launcher does. Under torchrun the folder stays if a rank has
        failed: a rank that is still starting must find the mark.
        """
        if self.path is None:
            return
        with suppress(OSError):
            (self.path / f"rank_{rank}.pid").unlink(missing_ok=True)
            if any(self.path.glob("rank_*.pid")) or self.launched:
                return
            if self.has_parent or {path.name for path in self.path.iterdir()} == {"launcher.pid"}:
                shutil.rmtree(self.path, ignore_errors=True)

    @property
    def launched(self) -> bool:
        """Whether the launcher mm-train, which watches the folder, is still running.

        True if its record is missing, for example because old files in /tmp were removed.
        """
        if not self.has_parent or self.path is None:
            return False
        note = self.path / "launcher.pid"
        return lives(note) or not note.exists()

    def pids(self) -> list[int]:
        """Process ids of the ranks that have started and have not ended normally."""
        found = []
        for path in sorted(self.path.glob("rank_*.pid")) if self.path is not None else ():
            with suppress(FileNotFoundError, ValueError):
                found.append(int(path.read_text().partition(" ")[0]))
        return found

    def note_log(self, rank: int, path: Path) -> None:
        """Records the path of a rank's log, for errors that the launcher prints for that rank.

        Args:
            rank: the rank's number among all hosts.
            path: the log.
        """
        if self.path is not None:
            with suppress(OSError):
                (self.path / f"log_{rank}").write_text(str(path))

    def mark(self, name: str, text: str = "") -> bool:
        """Sets a mark that the ranks of this host can read; False if another rank has set it before.

        Without a folder always True.
        """
        if self.path is None:
            return True
        try:
            descriptor = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        except OSError:
            return True  # printing twice is better than never
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        return True

    def read(self, name: str) -> str | None:
        """The text of a mark set by a rank of this host; None if it is not set."""
        if self.path is None:
            return None
        try:
            return (self.path / name).read_text()
        except OSError:
            return None

    def wait_for(self, name: str, seconds: float) -> bool:
        """Waits for a rank of this host to set a mark; False if none does within `seconds`."""
        end = time.monotonic() + seconds
        while self.path is not None and self.read(name) is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.read(name) is not None

    def failing(self) -> bool:
        """Whether a rank of this host has failed, or has vanished without ending normally."""
        marked = any(self.read(name) is not None for name in (FAILED, LOST, ENDED))
        notes = sorted(self.path.glob("rank_*.pid")) if self.path is not None else ()
        # A record that is gone in the meantime belongs to a rank that has ended normally.
        return marked or any(not lives(note) and note.exists() for note in notes)


def _forget_earlier(folder: Path) -> None:
    """Removes marks and notes of dead ranks that are older than this process, of an earlier launch.

    A shell that starts its ranks twice with the same port is the same parent both times.
    """
    since = time.time() - running_seconds()
    for path in folder.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < since and not lives(path):
                path.unlink()
