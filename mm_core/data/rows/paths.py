"""Paths in rows of a dataset: every path the system refuses becomes a DataError."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mm_core import files
from mm_core.errors import DataError, MMError, article
from mm_core.files import kind_of_file


def status(path: Path, what: str) -> os.stat_result | None:
    """File status of a path in a dataset's row, symbolic links followed; None if nothing is there.

    Raises:
        DataError: the system refuses the path; the error calls it `what`: "video", "image".
    """
    with refused(what, path):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def plain_file(path: Path, what: str, missing: str | None = None) -> int:
    """Size in bytes of a sample's file, after a check that it is a plain file: opening a named pipe would
    hang, and a device may never end.

    Args:
        path: the path.
        what: noun for the error message: "video", "image".
        missing: message if nothing is there; None: "the <what> does not exist".

    Raises:
        DataError: nothing is there, it is not a plain file, or the system refuses the path.
    """
    found = status(path, what)
    if found is None:
        raise DataError(
            missing or f"the {what} does not exist",
            where=str(path),
            hint="correct the path, or copy the file to this place",
        )
    if not stat.S_ISREG(found.st_mode):
        kind = kind_of_file(found.st_mode)
        raise DataError(f"this is {kind}, not {article(what)}", where=str(path), accepted="plain files")
    return found.st_size


def open_plain(path: Path, what: str) -> IO[bytes]:
    """Opens a file that data name; only a plain one: nothing waits for a pipe, and no device is read.

    Raises:
        DataError: it is anything else, or the system refuses the path; the error calls it `what`.
    """
    with refused(what, path):
        return files.open_plain(path)


def check_folder(path: Path, what: str) -> None:
    """Checks that a folder of samples exists.

    Args:
        path: the path.
        what: noun with its article for the error message: "the folder of the videos".

    Raises:
        DataError: `path` is not a folder.
    """
    found = status(path, what.removeprefix("the "))
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise DataError(
            f"{what} does not exist", where=str(path), hint="correct the path of the folder in the config"
        )


@contextmanager
def refused(what: str, path: Path) -> Iterator[None]:
    """A context that turns refusals of a sample's path, by the system or by Python, into a DataError."""
    try:
        yield
    except MMError:
        raise
    except (OSError, ValueError, RuntimeError) as fault:  # RuntimeError: a loop in Path.resolve up to 3.12
        raise DataError(
            f"the {what} cannot be opened: {refusal(fault)}",
            where=str(path),
            hint="correct the path, or allow this user to read the file",
        ) from None


def refusal(fault: BaseException) -> str:
    """The reason why the system refused a sample's path, without error number and path."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    if isinstance(fault, UnicodeEncodeError):
        return f"it contains {ascii(fault.object[fault.start])[1:-1]}, half of a character"
    return os.strerror(errno.ELOOP) if isinstance(fault, RuntimeError) else str(fault)
