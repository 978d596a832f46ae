"""What the commands on a trained run have in common: how it is named, and where their files go."""

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
    """The run, its config, and which of its weights are meant."""
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help=f"over the run's config, for {overrides_for}")
    add("--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints")
    add(
        "--weights",
        choices=("auto", "ema", "model"),
        default="auto",
        help="of the checkpoint; auto: the moving average where there is one",
    )
    add("--checkpoint", choices=("latest", "best"), default="latest", help="of a run's folder")
    add_allow_code(parser)


def run_folder(run: str) -> Path:
    """The folder of `DIR` or `DIR@STEP`, a run's or a checkpoint's. MMError where there is none."""
    for folder in (Path(run), Path(run.rpartition("@")[0] or run)):
        if folder.exists():
            return folder
    raise MMError("there is no such run", where=run, hint="mm-train prints the run's folder")


def open_stored(args: argparse.Namespace) -> StoredRun:
    """The checkpoint that is meant, and its config under the overrides. MMError where there is none."""
    from mm_core.checkpoint.reading import stored_run

    return stored_run(args.run, args.checkpoint, args.overrides, args.allow_code)


def check_place(path: Path) -> None:
    """MMError for a file that could not be written at the end of long work."""
    fault = "this is a folder" if path.is_dir() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            fault = fault or f"{'it' if path.exists() else 'its folder'} cannot be written to"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault is not None:
        raise MMError(f"the file cannot be written: {fault}", where=str(path), accepted="the path of a file")


def root_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint is of; its own where it lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist: nothing is overwritten."""
    names = (path if n == 1 else path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
    return next(each for each in names if not each.exists())
