"""Files and output folders that are written completely or not at all; what dead processes left."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from mm_core.errors import MMError
from mm_core.processes import alive

_PATIENCE = 24 * 3600.0
"""Seconds without a write after which a folder written by another host counts as abandoned."""

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_STAGE = re.compile(r".*\.tmp-[0-9a-f]+(?:-(\d+)@(.+))?\Z")


def state_folder(name: str) -> Path | None:
    """A folder for what is kept between runs of this user: `$XDG_STATE_HOME/mm_core/NAME`, by default below
    `~/.local/state`; None: the user has no home folder."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - no error without an account
    return state / "mm_core" / name if state.is_absolute() else None


def kind_of_file(mode: int) -> str:
    """The kind of anything but a plain file, by its `st_mode`: `a named pipe`."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def absent(path: Path) -> bool:
    """Whether nothing is at a path, links followed; false where the system refuses the path."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def open_plain(path: Path) -> IO[bytes]:
    """Opens a plain file for reading. A pipe would wait for a writer, and a device may never end.

    Raises:
        OSError: the path leads to anything else, or the system refuses it.
    """
    return os.fdopen(_plain_handle(path, os.O_RDONLY), "rb")


def open_append(path: Path, buffering: int = -1) -> IO[bytes]:
    """Opens a plain file for reading and appending, or makes it; errors are those of `open_plain`."""
    return os.fdopen(_plain_handle(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The mappings of a file of JSON lines, without those that a crash has cut; [] if it cannot be read."""
    rows = []
    with suppress(OSError):
        for line in read_plain(path).splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _plain_handle(path: Path, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, f"it is {kind_of_file(mode)}, not a plain file", str(path))


def read_plain(path: Path) -> bytes:
    """The content of a plain file; errors are those of `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def check_plain(path: Path) -> None:
    """Checks a file that a library opens by its path; errors are those of `open_plain`."""
    open_plain(path).close()


@contextmanager
def replacing(path: Path, *, named: bool = False) -> Iterator[Path]:
    """Replaces a file in one step: yields a temporary path beside it, renamed when the block succeeds.

    A reader sees the old file or the new one. After an error the old file is still there. A symbolic link
    stays, its target is replaced.

    Args:
        path: the file.
        named: the user names it: a pipe, a device or a descriptor (`/dev/stdout`) is written into.
    """
    descriptor = _descriptor(path) if named else None
    if descriptor is not None or (named and _is_special(path)):
        with tempfile.TemporaryDirectory() as folder:
            staged = Path(folder) / "staged"
            yield staged
            sys.stdout.flush()
            # Not created: what is no file has no content to truncate, and may be gone by now.
            opened = os.open(path, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
            with os.fdopen(opened, "wb") as out, staged.open("rb") as content:
                shutil.copyfileobj(content, out)
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    staged = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
    try:
        yield staged
        staged.replace(path)
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path such as `/dev/stdout` names, though it leads to a file."""
    for _ in range(40):  # as many links as Linux follows
        if path.name.isdigit() and str(path.parent) in (
            "/dev/fd",
            "/proc/self/fd",
            f"/proc/{os.getpid()}/fd",
        ):
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def _is_special(path: Path) -> bool:
    """Whether a path leads to a pipe, a device or a socket, which a file must not replace."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def replace_text(path: Path, text: str, *, durable: bool = False, named: bool = False) -> None:
    """Replaces a text file in one step; lone surrogates, which a text file cannot hold, become escapes.

    Args:
        path: the file.
        text: its new content.
        durable: wait until the content is on disk (fsync).
        named: as for `replacing`.
    """
    with replacing(path, named=named) as staged:
        if durable:
            write_durably(staged, text)
        else:
            staged.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    if durable:
        sync_folder(path.resolve().parent)


@contextmanager
def durable(path: Path, mode: Literal["xb", "wb"] = "xb") -> Iterator[IO[bytes]]:
    """Opens a binary file for writing whose content is on disk (fsync) when the block ends.

    Args:
        path: the file.
        mode: "xb" for a new file only; "wb" replaces an existing one.
    """
    with path.open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, text: str) -> None:
    """Writes a text file and waits until it is on disk (fsync)."""
    with durable(path, "wb") as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on disk: a rename survives a crash only after that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_number(value: float) -> float | str:
    """A number as a JSON value; one that is not finite becomes "NaN", "Infinity" or "-Infinity".

    `float()` reads these strings.
    """
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_numbers(figures: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers by name as JSON values; those that are not finite become strings (see `json_number`)."""
    return {name: json_number(value) for name, value in figures.items()}


def stage_name(final: str) -> str:
    """A new temporary folder name for files being written; it contains the writing process and its host."""
    return f"{final}.tmp-{secrets.token_hex(4)}-{os.getpid()}@{socket.gethostname()}"


def remove_stale_stages(folder: Path, pattern: str = "*.tmp-*", patience: float | None = None) -> None:
    """Removes temporary folders and files of dead processes; those of a live process on this host stay.

    Args:
        folder: where to search.
        pattern: glob pattern of their names.
        patience: seconds since the last write after which those of another host count as abandoned. None:
            they are abandoned, because the caller holds the lock that a writer would hold.
    """
    for leftover in folder.glob(pattern):
        owner = _STAGE.match(leftover.name)
        here = owner is not None and owner[2] == socket.gethostname()
        if owner and here and int(owner[1]) != os.getpid() and alive(int(owner[1])):
            continue
        if not here and patience is not None and time.time() - _written(leftover) < patience:
            continue
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _written(path: Path) -> float:
    """The time of the last write to anything in a folder."""
    times = [0.0]
    for place in (path, *path.rglob("*")):
        with suppress(OSError):
            times.append(place.lstat().st_mtime)
    return max(times)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Writes a folder completely or not at all: yields a temporary folder, renamed when the block succeeds.

    The block must leave its files on disk (`durable`, `write_durably`); folders are synced here. After an
    error nothing is left. After a kill, the next call for the same name removes the temporary folder; on
    another host it does so a day later.

    Raises:
        MMError: `out` exists already, or the block raised an OSError such as a full disk.
    """
    check_unused(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_stages(out.parent, f".{glob.escape(out.name)}.tmp-*", patience=_PATIENCE)
        stage = out.with_name(stage_name(f".{out.name}"))
        stage.mkdir()
    except OSError as fault:
        raise _failed(out, fault) from None
    try:
        yield stage
        for folder in (*(path for path in stage.rglob("*") if path.is_dir()), stage):
            sync_folder(folder)
        check_unused(out)
        stage.rename(out)
        sync_folder(out.parent)
    except BaseException as fault:
        shutil.rmtree(stage, ignore_errors=True)
        if isinstance(fault, OSError):
            raise _failed(out, fault) from None
        raise


def check_unused(out: Path) -> None:
    """Raises MMError if the output path exists already; an empty folder is accepted."""
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise MMError(
            "this path exists already, and nothing is ever overwritten",
            where=str(out),
            accepted="a path that does not exist, or an empty folder",
            hint="choose another --out, or move the existing one away",
        )


def os_reason(fault: OSError) -> str:
    """Why a file or folder could not be written or read, in words: `the disk is full`."""
    return _FULL.get(fault.errno or 0) or f"{fault.strerror or fault}"


def _failed(out: Path, fault: OSError) -> MMError:
    return MMError(
        f"this folder could not be written and was removed again: {os_reason(fault)}",
        where=str(out),
        hint="check free space, quota and permissions there, then run the command again",
    )


def write_text(path: Path, text: str) -> None:
    """Writes a text file completely or not at all; lone surrogates become escapes.

    Raises:
        MMError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text, named=True)
    except OSError as fault:
        raise MMError(
            f"the file cannot be written: {fault.strerror or fault}",
            where=str(path),
            hint="check free space, quota and permissions there, or choose another path",
        ) from fault
