"""Ranks of a command: this process is one of them, or starts them."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Sequence

from mm_core.cli.options import count
from mm_core.errors import MMError

READER_LEFT = 141
"""Exit code of a command whose output nobody reads any more: 128 + SIGPIPE."""


def add_ranks(parser: argparse.ArgumentParser, and_share: str = "") -> None:
    """How many ranks hold the model. and_share: what else they share."""
    parser.add_argument(
        "--nproc",
        type=count,
        metavar="N",
        help=f"ranks on this host that share the model, as in training{and_share} (default 1)",
    )


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
        refuse_among_ranks(args, ["nproc"])
        from mm_core.runtime.launch.rank_process import leave, run_as_rank

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # heard in a collective too; there is nothing to save
        leave(run_as_rank(lambda: _while_read(lambda: work(args))))
    check(args)
    if args.nproc in (None, 1):
        return work(args)
    if before_launch is not None:
        before_launch(args)
    from mm_core.runtime.launch.launcher import Nodes, launch

    words = rank_command(command, args, together=together)
    return launch(words, Nodes(args.nproc), announce=False, outlives_interrupts=outlives_interrupts)


def rank_command(
    command: str,
    args: argparse.Namespace,
    of_launch: Collection[str] = ("nproc",),
    together: Collection[str] = (),
) -> list[str]:
    """The command line of a rank: that of this command, without what says how ranks are launched.

    Args:
        of_launch: options that the ranks are not given. together: those that take all their values at once.
    """
    from mm_core.runtime.launch.launcher import COMMAND

    words = [*COMMAND, command, *args.overrides]
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in (*of_launch, "overrides") or value is None:
            continue
        if isinstance(value, bool):
            words += [option] * value
        elif name in together:
            words += [option, *map(str, value)]
        elif isinstance(value, list):
            words += [f"{option}={each if isinstance(each, str) else json.dumps(each)}" for each in value]
        else:
            words.append(f"{option}={value}")
    return words


def refuse_among_ranks(args: argparse.Namespace, of_launch: Sequence[str]) -> None:
    """MMError where a process that a launcher has started is given options of a launcher: the world is given,
    and they would be passed over in silence."""
    given = [f"--{name.replace('_', '-')}" for name in of_launch if getattr(args, name) is not None]
    if given:
        raise MMError(
            f"{', '.join(given)} cannot be met: this process is already rank {os.environ['RANK']} of"
            f" {os.environ.get('WORLD_SIZE', '?')} (RANK is set in the environment)",
            where="command line",
            hint="leave the options to torchrun, or unset RANK and let the command start the ranks",
        )


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
