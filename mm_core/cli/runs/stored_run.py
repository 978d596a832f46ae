"""Options shared by the commands on a trained run, and where these commands write files."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import add_allow_code
from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.checkpoint.reading import StoredRun


def add_run(parser: argparse.ArgumentParser, overrides_for: str = "folders that have moved") -> None:
    """Adds the options that select a trained run, its checkpoint and its weights to a command's parser.

    Args:
        parser: parser of the command.
        overrides_for: what overrides are useful for, for the help text.
    """
    add = parser.add_argument
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"override a key of the run's config, e.g. for {overrides_for}",
    )
    add("--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints")
    add(
        "--weights",
        choices=("auto", "ema", "model"),
        default="auto",
        help="weights to use; auto (the default): the moving average if the checkpoint has one",
    )
    add(
        "--checkpoint",
        choices=("latest", "best"),
        default="latest",
        help="which checkpoint to use when --run names a run folder (default: latest)",
    )
    add_allow_code(parser)


def run_folder(run: str) -> Path:
    """The folder that the option --run names, as `DIR` or `DIR@STEP`: of a run or of a checkpoint.

    Raises:
        MMError: there is no such folder.
    """
    for folder in (Path(run), Path(run.rpartition("@")[0] or run)):
        if folder.exists():
            return folder
    raise MMError(
        "there is no such run",
        where=run,
        hint="pass a folder that mm-train printed: a run, such as runs/NAME, or one of its checkpoints",
    )


def open_stored(args: argparse.Namespace) -> StoredRun:
    """The stored run that a command's options select: a checkpoint, and its config with the overrides.

    Raises:
        MMError: there is no such run or checkpoint.
    """
    from mm_core.checkpoint.reading import stored_run

    return stored_run(args.run, args.checkpoint, args.overrides, args.allow_code)


def check_place(path: Path) -> None:
    """Raises MMError if a command's output file cannot be written, before the long work starts."""
    fault = "this is a folder" if path.is_dir() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            fault = fault or f"no write permission for {'it' if path.exists() else 'its folder'}"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault is not None:
        raise MMError(f"the file cannot be written: {fault}", where=str(path), accepted="the path of a file")


def root_of(checkpoint: Path) -> Path:
    """The folder of a checkpoint's run, or of the checkpoint itself if it is not in a run's folder."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def unused(path: Path) -> Path:
    """An output path that does not exist yet: `path`, `path-2`, `path-3`, ... Nothing is overwritten."""
    names = (path if n == 1 else path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
    return next(each for each in names if not each.exists())
