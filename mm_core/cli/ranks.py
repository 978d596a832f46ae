"""Commands on several ranks: this process starts the ranks, or is one of them."""

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
"""Exit code of a command whose output pipe was closed by its reader: 128 + SIGPIPE."""


def add_ranks(parser: argparse.ArgumentParser, and_share: str = "") -> None:
    """Adds the option --nproc, the number of ranks, to a command's parser.

    Args:
        parser: parser of the command.
        and_share: what the ranks share beside the model, for the help text.
    """
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
    before_launch: Callable[[argparse.Namespace], object] | None = None,
    outlives_interrupts: bool = False,
) -> int:
    """Runs a command in this process, or on the number of ranks that --nproc sets, and returns its exit code.

    Under a launcher (RANK is set) this process is a rank, and does not return.

    Args:
        args: the parsed options.
        command: name of the subcommand.
        work: what each rank does; returns the exit code.
        check: quick checks, before anything is started; raises MMError.
        before_launch: slower checks, done once before ranks start so that not every rank reports the error.
        outlives_interrupts: whether the command goes on after Ctrl-C, however often it is pressed.
    """
    if "RANK" in os.environ:
        refuse_among_ranks(args, ["nproc"])
        from mm_core.runtime.launch.rank_process import leave, run_as_rank

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # works within a collective too; nothing needs saving
        leave(run_as_rank(lambda: _while_read(lambda: work(args))))
    check(args)
    if args.nproc in (None, 1):
        return work(args)
    if before_launch is not None:
        before_launch(args)
    from mm_core.runtime.launch.launcher import launch
    from mm_core.runtime.launch.meeting import Nodes

    words, nodes = rank_command(command, args), Nodes(args.nproc)
    return launch(words, nodes, announce=False, outlives_interrupts=outlives_interrupts)


def rank_command(
    command: str, args: argparse.Namespace, of_launch: Collection[str] = ("nproc",)
) -> list[str]:
    """The command line that starts one rank: this command's options, without those that launch ranks.

    Args:
        command: name of the subcommand, with its action if it has any: `cache build`.
        args: its parsed options.
        of_launch: options that ranks do not receive.
    """
    from mm_core.runtime.launch.launcher import COMMAND

    words = [*COMMAND, *command.split(), *args.overrides]
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in (*of_launch, "overrides", "action") or value is None:
            continue
        if isinstance(value, bool):
            words += [option] * value
        elif isinstance(value, list):
            words += [f"{option}={each if isinstance(each, str) else json.dumps(each)}" for each in value]
        else:
            words.append(f"{option}={value}")
    return words


def refuse_among_ranks(args: argparse.Namespace, of_launch: Sequence[str]) -> None:
    """Raises MMError if a rank that a launcher has started receives options that launch ranks.

    The launcher has set the number of ranks already, so these options would be ignored silently.
    """
    given = [f"--{name.replace('_', '-')}" for name in of_launch if getattr(args, name) is not None]
    if given:
        raise MMError(
            f"{', '.join(given)} cannot be used here: this process is already rank {os.environ['RANK']} of"
            f" {os.environ.get('WORLD_SIZE', '?')} (RANK is set in the environment)",
            where="command line",
            hint="pass such options to torchrun, or unset RANK and let this command start the ranks",
        )


def _while_read(work: Callable[[], int]) -> int:
    """The exit code of a rank's work; 141, without a message, if the reader of the output has gone."""
    try:
        return work()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):
            raise  # another pipe is broken
        from mm_core.runtime.launch.rank_process import mark_reported

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        mark_reported()
        return READER_LEFT
