"""A folder that exists under its name only when it is whole."""

from __future__ import annotations

import errno
import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm_core.errors import MMError
from mm_core.train.checkpoint_io import sync_folder
from mm_core.train.checkpoint_retention import remove_stale_stages, stage_name

_PATIENCE = 24 * 3600.0
"""Seconds for which what another host writes may stand still before it is taken for dead."""

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


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
