"""Code named by a stored run: code that this user has trained with may run without asking.

Training records the hash of every code file that its config names, in a folder of the user's home: one entry
per hash, so that any number of jobs and hosts can write at the same time without a lock. Files beside a run
are not consulted: the author of the run may have written them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mm_core.errors import MMError, TrustError, plain_reason
from mm_core.files import state_folder

MAX_SOURCE = 8 * 2**20
"""Most bytes in a code file: a path in somebody else's config may name an endless file."""

ALLOW = "read the code named above; if you trust it, pass --allow-code (in Python: allow_code=True)"


class Piece(NamedTuple):
    """A piece of code that a run's config names."""

    name: str  # the file, or the words of a command
    digest: str  # hash of the bytes that run


def digest_of(content: bytes) -> str:
    """The hash of a piece of code in the list of code that this user has trained with."""
    return hashlib.sha256(content).hexdigest()


def read_source(path: Path) -> bytes:
    """Reads a plugin's code file once, to hash and to compile the same bytes.

    Raises:
        OSError: the file cannot be read, is too large or is not a regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block forever
        raise OSError(errno.EINVAL, "it is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_SOURCE + 1)
    if len(content) > MAX_SOURCE:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_SOURCE >> 20} MiB")
    return content


@dataclass(frozen=True)
class KnownCode:
    """The list of code that a user has trained with."""

    folder: Path | None  # folder of the entries; None: the user has no home folder

    @classmethod
    def of_user(cls) -> KnownCode:
        """The list of code that the current user has trained with.

        It is in `$XDG_STATE_HOME/mm_core/trusted_code`, by default `~/.local/state/mm_core/trusted_code`.
        """
        return cls(state_folder("trusted_code"))

    def fault(self) -> str | None:
        """Why the list of trusted code cannot be used; None if it can, or does not exist yet."""
        if self.folder is None:
            return "this user has no home folder"
        try:
            return _fault(self.folder, stat.S_ISDIR)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{self.folder} cannot be read: {plain_reason(error)}"

    def holds(self, digest: str) -> bool:
        """Whether this user has trained with code of this hash."""
        if self.folder is None or self.fault() is not None:
            return False
        with suppress(OSError):  # there is no such entry
            return _fault(self.folder / digest, stat.S_ISREG) is None
        return False

    def unknown(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces of code that this user has not trained with."""
        return [piece for piece in pieces if not self.holds(piece.digest)]

    def add(self, pieces: Collection[Piece]) -> str | None:
        """Records code that this user trains with. Returns the error if that fails: the run goes on."""
        if not (new := self.unknown(pieces)):
            return None
        if (fault := self.fault()) is not None or self.folder is None:
            return fault
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Each entry appears whole, and with its permissions: other ranks and hosts read and write too.
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as staging:
                for piece in new:
                    entry = Path(staging, piece.digest)
                    entry.touch(mode=0o600)
                    entry.write_bytes(f"{piece.name}\n".encode(errors="backslashreplace"))
                    entry.replace(self.folder / piece.digest)
        except OSError as error:
            return f"{self.folder} cannot be written: {plain_reason(error)}"
        return self.fault()


def _fault(path: Path, is_kind: Callable[[int], bool]) -> str | None:
    """Why the list, or an entry of it, cannot be used. Links are not followed."""
    found = path.lstat()
    if not is_kind(found.st_mode):
        return f"{path} is not a folder"  # only the list's own faults are reported
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    return f"{path} can be written by others" if found.st_mode & 0o022 else None


def check_known(pieces: Iterable[Piece], where: str, what: str = "the code of a stored run") -> None:
    """Checks that this user has trained with the code that would run.

    Args:
        pieces: the code.
        where: what names the code: a config, a folder.
        what: the code in the words of the error.

    Raises:
        TrustError: this user has not trained with some of it.
    """
    if new := KnownCode.of_user().unknown(pieces):
        raise untrusted(dict.fromkeys(piece.name for piece in new), where, what)


def untrusted(names: Iterable[str], where: str, what: str) -> MMError:
    """The error for code that this user has not trained with.

    Args:
        names: the files, or other places of the code.
        where: what names the code.
        what: the code in the words of the error.
    """
    known = KnownCode.of_user()
    accepted = f"code that this user has trained with before (recorded in {known.folder})"
    if (fault := known.fault()) is not None:
        accepted = f"no code without asking: the record of code you trained with is not used because {fault}"
    return TrustError(
        f"{what} would run with your rights, and you have not trained with it: {', '.join(names)}",
        where=where,
        accepted=accepted,
        hint=ALLOW,
    )
