"""The folder in which the ranks of one launch on one host meet: who lives, who failed, who may speak."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mm_core.processes import started
from mm_core.runtime.leftovers import clear_after, lives, note_process

LAUNCH_DIR = "MM_LAUNCH_DIR"
"""Variable that names the folder which mm-train made for its ranks."""

FAILED, LOST, ENDED, STOPPED_EARLY = "failed", "lost", "ended", "stopped"
"""Marks. A rank said its error; one lost the others, and was silent; one ended with a code of its own and
no word; the run saved and stopped on request."""


class LaunchFolder:
    """Marks and process ids of the ranks of one launch on this host.

    Without a path (a lone process, or a folder that somebody else owns) every rank stands alone: it
    may always speak, and sees no others.

    Args:
        path: the folder, or None.
        has_parent: whether mm-train watches the folder and says what ranks leave unsaid.
    """

    def __init__(self, path: Path | None, has_parent: bool = False) -> None:
        self.path, self.has_parent = path, has_parent

    @classmethod
    def current(cls) -> LaunchFolder:
        """The folder of this process's launch: mm-train's or, under torchrun, one named after its agent."""
        if own := os.environ.get(LAUNCH_DIR):
            return cls(Path(own), has_parent=True)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls(None)
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
        """Notes this process as the launcher."""
        if self.path is not None:
            note_process(self.path / "launcher.pid", os.getpid())

    def enter(self, rank: int) -> None:
        """Notes this process as the host's `rank`-th."""
        if self.path is None:
            return
        with suppress(OSError):  # what is left of the launch may have cleared up already
            note_process(self.path / f"rank_{rank}.pid", os.getpid())
            if not self.has_parent:
                note_process(self.path / "launcher.pid", os.getppid())
        clear_after(self.path)

    def depart(self, rank: int) -> None:
        """Takes the note back: this process ends in good order.

        The last one removes the folder where no launcher does. Under torchrun it is kept where a rank has
        failed: one that is still starting must find the mark.
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
        """Whether mm-train, which watches the folder, still lives. Where its note is gone, as by what clears
        /tmp of old files, nobody knows better."""
        if not self.has_parent or self.path is None:
            return False
        note = self.path / "launcher.pid"
        return lives(note) or not note.exists()

    def pids(self) -> list[int]:
        """Process ids of the ranks that have entered and not departed."""
        found = []
        for path in sorted(self.path.glob("rank_*.pid")) if self.path is not None else ():
            with suppress(FileNotFoundError, ValueError):
                found.append(int(path.read_text().partition(" ")[0]))
        return found

    def note_log(self, rank: int, path: Path) -> None:
        """Notes where the log of a rank (of all hosts') lies: the launcher says so where it speaks for it."""
        if self.path is not None:
            with suppress(OSError):
                (self.path / f"log_{rank}").write_text(str(path))

    def mark(self, name: str, text: str = "") -> bool:
        """Leaves a mark; False when another rank has left it before. Without a folder always True."""
        if self.path is None:
            return True
        try:
            descriptor = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        except OSError:
            return True  # better said twice than never
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        return True

    def read(self, name: str) -> str | None:
        """The text of a mark, None where there is none."""
        if self.path is None:
            return None
        try:
            return (self.path / name).read_text()
        except OSError:
            return None

    def wait_for(self, name: str, seconds: float) -> bool:
        """Whether a mark is left within so many seconds."""
        end = time.monotonic() + seconds
        while self.path is not None and self.read(name) is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.read(name) is not None

    def failing(self) -> bool:
        """Whether a rank of this host has failed, or is gone without having departed."""
        marked = any(self.read(name) is not None for name in (FAILED, LOST, ENDED))
        notes = sorted(self.path.glob("rank_*.pid")) if self.path is not None else ()
        # A note that is gone meanwhile is that of a rank that has departed.
        return marked or any(not lives(note) and note.exists() for note in notes)
