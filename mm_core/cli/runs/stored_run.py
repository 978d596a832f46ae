"""What the commands on a trained run have in common: how it is named, and the ranks that share its model."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.allow_code import add_allow_code
from mm_core.cli.training.train import refuse_among_ranks
from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.checkpoint.reading import StoredRun

READER_LEFT = 141
"""Exit code of a command whose output nobody reads any more: 128 + SIGPIPE."""


def add_run(parser: argparse.ArgumentParser, overrides_for: str = "folders that have moved") -> None:
    """The run, its config, and which of its weights are meant."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"over the run's config, for {overrides_for}"
    )
    parser.add_argument(
        "--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "ema", "model"),
        default="auto",
        help="of the checkpoint; auto: the moving average where there is one",
    )
    parser.add_argument(
        "--checkpoint", choices=("latest", "best"), default="latest", help="of a run's folder"
    )
    add_allow_code(parser)


def add_ranks(parser: argparse.ArgumentParser, and_share: str = "") -> None:
    """How many ranks hold the model. and_share: what else they share."""
    parser.add_argument(
        "--nproc",
        type=count,
        metavar="N",
        help=f"ranks on this host that share the model, as in training{and_share} (default 1)",
    )


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
            fault = fault or f"{'it' if path.exists() else 'its folder'} can not be written to"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault is not None:
        raise MMError(f"the file can not be written: {fault}", where=str(path), accepted="the path of a file")


def on_ranks(
    args: argparse.Namespace,
    command: str,
    work: Callable[[argparse.Namespace], int],
    check: Callable[[argparse.Namespace], None],
    together: Collection[str] = (),
    before_launch: Callable[[argparse.Namespace], object] | None = None,
    outlives_interrupts: bool = False,
) -> int:
    """Does `work` here, or by `--nproc` ranks, which are started. Returns the exit code. Under a launcher
    (RANK is set) this process is a rank, and does not return.

    Args:
        command: the subcommand. together: its options that take all their values at once.
        check: what is wrong at first sight. before_launch: what is better said once than by each rank.
        outlives_interrupts: Ctrl-C may mean less than the command's end, however often it comes.
    """
    if "RANK" in os.environ:
        refuse_among_ranks(["--nproc"] if args.nproc is not None else [])
        from mm_core.runtime.launch.rank_process import leave, run_as_rank

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # heard in a collective too; there is nothing to save
        leave(run_as_rank(lambda: _while_read(lambda: work(args))))
    check(args)
    if args.nproc in (None, 1):
        return work(args)
    if before_launch is not None:
        before_launch(args)
    from mm_core.runtime.launch.launcher import COMMAND, Nodes, launch

    words = [*COMMAND, command, *_words(args, together)]
    return launch(words, Nodes(args.nproc), announce=False, outlives_interrupts=outlives_interrupts)


def _while_read(work: Callable[[], int]) -> int:
    """The exit code of a rank's work; 141, in silence, where the reader of the output went away."""
    try:
        return work()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):
            raise  # of another pipe
        from mm_core.runtime.launch.rank_process import has_told

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at exit
        has_told()
        return READER_LEFT


def _words(args: argparse.Namespace, together: Collection[str]) -> list[str]:
    """The command line of a rank."""
    options = vars(args).copy()
    words = [*options.pop("overrides")]
    del options["nproc"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] * value
        elif name in together and value is not None:
            words += [option, *map(str, value)]
        elif isinstance(value, list):
            words += [f"{option}={each if isinstance(each, str) else json.dumps(each)}" for each in value]
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def count(text: str) -> int:
    """A number of things, of which there is at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist: nothing is overwritten."""
    names = (path if n == 1 else path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
    return next(each for each in names if not each.exists())
