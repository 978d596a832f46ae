"""Claims of work on a feature cache: a file for each chunk that a process is encoding, on any host."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from mm_core.data.cache.shards import writing
from mm_core.errors import CacheError
from mm_core.files import open_plain, os_reason
from mm_core.processes import alive, started

SILENT = 600.0
"""Seconds after which a process that has not touched its claims counts as dead, on whatever host."""
_LONGEST = 1000  # bytes of a claim
_OWNER = re.compile(r"([0-9]{1,9}) ([^@]*)@(.*)", re.DOTALL)  # process id, its start and host


class Claims:
    """The chunks that this process has claimed; others leave them alone until they are released.

    Args:
        folder: of the claims.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own: set[str] = set()

    def take(self, name: str) -> bool:
        """Claims a chunk, also one whose owner is dead; false if a living process has it.

        Raises:
            CacheError: the folder cannot be written.
        """
        path = self.folder / name
        if not _freed(path):
            return False
        with writing(self.folder), suppress(FileExistsError), path.open("x") as file:
            file.write(f"{os.getpid()} {started(os.getpid())}@{socket.gethostname()}")
            self._own.add(name)
            return True
        return False

    def touch(self) -> None:
        """Shows that this process is alive."""
        for name in self._own:
            with suppress(OSError):
                os.utime(self.folder / name)

    def release(self, name: str) -> None:
        """Gives a chunk back, encoded or not."""
        self._own.discard(name)
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Gives all chunks back."""
        for name in [*self._own]:
            self.release(name)

    def sweep(self) -> None:
        """Removes the claims of the dead. Nobody takes one whose owner died once it had written the chunk."""
        for path in [*self.folder.glob("*")]:
            _freed(path)


def _freed(path: Path) -> bool:
    """Removes the claim of a dead process; false where a living one has the chunk, claimed meanwhile too."""
    try:
        claim, silent = _read(path), time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return True
    except OSError as error:
        raise CacheError(f"a claim cannot be read: {os_reason(error)}", where=str(path)) from None
    owner = _OWNER.fullmatch(claim)
    if silent < SILENT and (owner is None or owner[3] != socket.gethostname()):
        return False  # without an owner it is being written
    # Since a restart of the container, another process may have the id of one that has ended.
    if silent < SILENT and owner and alive(int(owner[1])) and started(int(owner[1])) == owner[2]:
        return False
    stale = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):  # of several that see it, one renames it
        path.rename(stale)
        if _read(stale) != claim:
            stale.rename(path)
            return False
        stale.unlink()
    return True


def _read(path: Path) -> str:
    with open_plain(path) as file:
        return file.read(_LONGEST).decode(errors="replace")
