"""Paths that rows name. Anything may stand there: every refusal of the system is a DataError, made here."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm_core.errors import DataError, MMError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def status(path: Path, what: str) -> os.stat_result | None:
    """What is at a path, symbolic links followed; None for nothing. DataError for what the system refuses.

    Args:
        path: what a row names.
        what: the noun for it in the sentence: "video", "image".
    """
    with refused(what, path):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def plain_file(path: Path, what: str, missing: str | None = None) -> int:
    """The bytes of a file that can be opened without waiting: opening a named pipe would wait for ever, and a
    device may never end.

    Args:
        path, what: as of `status`.
        missing: the sentence where nothing is there; None: "the <what> does not exist".

    Raises:
        DataError: nothing is there, it is no plain file, or the system refuses the path.
    """
    found = status(path, what)
    if found is None:
        raise DataError(missing or f"the {what} does not exist", where=str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        article = "an" if what[0] in "aeiou" else "a"
        raise DataError(f"is {kind}, not {article} {what}", where=str(path), accepted="plain files")
    return found.st_size


def check_folder(path: Path, what: str) -> None:
    """DataError where `path` is no folder. what: the noun with its article, as "the folder of the videos"."""
    found = status(path, what.removeprefix("the "))
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise DataError(f"{what} does not exist", where=str(path))


@contextmanager
def refused(what: str, path: Path) -> Iterator[None]:
    """What the system, or Python before it, refuses to do with `path` in the block is a DataError."""
    try:
        yield
    except MMError:
        raise
    except (OSError, ValueError, RuntimeError) as fault:  # RuntimeError: a loop, of Path.resolve up to 3.12
        raise DataError(f"the {what} cannot be opened: {refusal(fault)}", where=str(path)) from None


def refusal(fault: BaseException) -> str:
    """Why a path was refused, without the number of the error and the path around it."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    if isinstance(fault, UnicodeEncodeError):
        return f"it holds {ascii(fault.object[fault.start])[1:-1]}, half of a character"
    return os.strerror(errno.ELOOP) if isinstance(fault, RuntimeError) else str(fault)
