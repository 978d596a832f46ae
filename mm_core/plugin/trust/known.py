"""Code that comes with a stored run: which of it this user has trained with, and so may run unasked.

Training records the hash of every file of code that its config names, in a folder of the user's home: one
entry a hash, so that any number of jobs and hosts write at the same time without a lock. Nothing that lies
beside a run is asked, because whoever made the run may have written it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mm_core.errors import MMError, TrustError, plain_reason

MAX_SOURCE = 8 * 2**20
"""Bytes of a file of code: a path that a stranger chose may name something endless."""

ALLOW = "read what is named above, then pass --allow-code (in Python: allow_code=True)"


@dataclass(frozen=True)
class Piece:
    """A piece of code. name: the file, or the words of a command. digest: of the bytes that run."""

    name: str
    digest: str


def digest_of(content: bytes) -> str:
    """What stands for the content in the list."""
    return hashlib.sha256(content).hexdigest()


def read_source(path: Path) -> bytes:
    """The bytes of a file of code, to be hashed and compiled: it is never read twice. OSError for none."""
    if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for ever
        raise OSError(errno.EINVAL, "it is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_SOURCE + 1)
    if len(content) > MAX_SOURCE:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_SOURCE >> 20} MiB")
    return content


@dataclass(frozen=True)
class KnownCode:
    """The list of a user. folder: where its entries are; None for a user without a home."""

    folder: Path | None

    @classmethod
    def of_user(cls) -> KnownCode:
        """`$XDG_STATE_HOME/mm_core/trusted_code`, by default `~/.local/state/mm_core/trusted_code`."""
        given = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not given.is_absolute():
            try:
                given = Path.home() / ".local" / "state"
            except RuntimeError:  # a user id that no account has
                return cls(None)
        return cls(given / "mm_core" / "trusted_code" if given.is_absolute() else None)

    def fault(self) -> str | None:
        """Why the list cannot be relied on; None for one that can, or that is not there yet."""
        if self.folder is None:
            return "this user has no home folder"
        try:
            found = self.folder.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{self.folder} cannot be read: {plain_reason(error)}"
        if not stat.S_ISDIR(found.st_mode):
            return f"{self.folder} is not a folder"
        fault = _shared(found)
        return fault and f"{self.folder} {fault}"

    def holds(self, digest: str) -> bool:
        """Whether this user has trained with code of that hash."""
        if self.folder is None or self.fault() is not None:
            return False
        try:
            found = (self.folder / digest).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and _shared(found) is None

    def unknown(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that it does not hold."""
        return [piece for piece in pieces if not self.holds(piece.digest)]

    def add(self, pieces: Collection[Piece]) -> str | None:
        """Records the code. Returns why it could not, in words: no run fails for that."""
        if not (new := self.unknown(pieces)):
            return None
        if (fault := self.fault()) is not None or self.folder is None:
            return fault
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for piece in new:
                self._write(self.folder, piece)
        except OSError as error:
            return f"{self.folder} cannot be written: {plain_reason(error)}"
        return self.fault()

    @staticmethod
    def _write(folder: Path, piece: Piece) -> None:
        """An entry, whole under its name. mkstemp makes files that only their owner reads or writes."""
        handle, staged = tempfile.mkstemp(prefix=".new-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(f"{piece.name}\n".encode(errors="backslashreplace"))
            os.replace(staged, folder / piece.digest)  # noqa: PTH105
        except OSError:
            with suppress(OSError):
                Path(staged).unlink()
            raise


def _shared(found: os.stat_result) -> str | None:
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    return "can be written by others" if found.st_mode & 0o022 else None


def check_known(pieces: Iterable[Piece], where: str, what: str = "the code of a stored run") -> None:
    """TrustError for code that this user has not trained with.

    Args:
        pieces: what would run.
        where: what names it: a config, a folder.
        what: how the sentence calls it.
    """
    known = KnownCode.of_user()
    if new := list(dict.fromkeys(piece.name for piece in known.unknown(pieces))):
        raise untrusted(new, where, what, known)


def untrusted(names: Iterable[str], where: str, what: str, known: KnownCode | None = None) -> MMError:
    """The refusal. names: the files, or other places."""
    known = known or KnownCode.of_user()
    fault = known.fault()
    accepted = f"what this user has trained with (listed in {known.folder})"
    if fault is not None:
        accepted = f"nothing unasked: the list of what this user has trained with is not used, since {fault}"
    return TrustError(
        f"{what} would run with your rights, and you have not trained with it: {', '.join(names)}",
        where=where,
        accepted=accepted,
        hint=ALLOW,
    )
