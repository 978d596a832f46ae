"""Files and folders that are there whole or not at all, and what dead processes have left of them."""

from __future__ import annotations

import errno
import glob
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from mm_core.errors import MMError
from mm_core.processes import alive

_PATIENCE = 24 * 3600.0
"""Seconds for which what another host writes may stand still before it is taken for dead."""

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_STAGE = re.compile(r".*\.tmp-[0-9a-f]+(?:-(\d+)@(.+))?\Z")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` to write to; when the block ends well, it becomes `path` in one step: a
    reader sees the old file or the new one. A fault leaves the old one."""
    staged = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
    try:
        yield staged
        staged.replace(path)
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces a file of text in one step. Halves of characters, which no file of text takes, become escapes.

    Args:
        path: the file. text: all of it.
        durable: waits until the disk has it.
    """
    with replacing(path) as staged:
        if durable:
            write_durably(staged, text)
        else:
            staged.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    if durable:
        sync_folder(path.parent)


@contextmanager
def durable(path: Path, mode: Literal["xb", "wb"] = "xb") -> Iterator[IO[bytes]]:
    """A file to write to, a new one unless `mode` says otherwise, which the disk has when the block ends."""
    with path.open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, text: str) -> None:
    """Writes a text file and waits until the disk has it."""
    with durable(path, "wb") as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the folder's entries: a rename is lasting only after it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_number(value: float) -> float | str:
    """A number for JSON, which has none for what is not finite: "NaN", "Infinity" and "-Infinity", which
    `float()` reads."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_numbers(figures: Mapping[str, float]) -> dict[str, float | str]:
    """The same of each figure by its name."""
    return {name: json_number(value) for name, value in figures.items()}


def stage_name(final: str) -> str:
    """A fresh name for a checkpoint that is being written: it says who writes it."""
    return f"{final}.tmp-{secrets.token_hex(4)}-{os.getpid()}@{socket.gethostname()}"


def remove_stale_stages(folder: Path, pattern: str = "*.tmp-*", patience: float | None = None) -> None:
    """Removes what dead runs left unfinished; what a live process of this host writes is left alone.

    patience: seconds since something was last written to it, after which that of another host is taken for
        dead; None where it is known to be: the caller holds the lock that a writer would hold.
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
    """When anything in a folder was last written."""
    times = [0.0]
    for place in (path, *path.rglob("*")):
        with suppress(OSError):
            times.append(place.lstat().st_mtime)
    return max(times)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Gives a folder beside `out` to write to; when the block ends well, it gets the name `out`.

    What the block writes must be on disk when it ends (`durable`, `write_durably`); its folders are seen
    to here. A fault leaves nothing; what a kill leaves is removed by the next export of the same name, on
    another host a day later.

    Raises:
        MMError: something lies at `out` already, or an OSError in the block: a full disk, say.
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
    """MMError where something lies at `out` already, but for an empty folder."""
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise MMError(
            "there is something here already, and nothing is ever overwritten",
            where=str(out),
            accepted="a name that is not in use, or an empty folder",
            hint="choose another --out, or move it away",
        )


def _failed(out: Path, fault: OSError) -> MMError:
    why = _FULL.get(fault.errno or 0) or f"{fault.strerror or fault}"
    return MMError(
        f"writing this folder failed, and nothing of it is left: {why}",
        where=str(out),
        hint="check free space, quota and permissions there, then write it again",
    )


def write_text(path: Path, text: str) -> None:
    """A file that is there whole or not at all; a name that is no text is written as JSON's escapes. MMError
    where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as fault:
        raise MMError(f"the file cannot be written: {fault.strerror or fault}", where=str(path)) from fault
