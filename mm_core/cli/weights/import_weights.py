"""`mm import`: weights from elsewhere as a run's first checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.allow_code import add_allow_code
from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.config.schema import RunConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("--from", dest="path", required=True, metavar="DIR", help="a folder of weights, or a file")
    add("--config", required=True, metavar="YAML", help="of the run that is to begin with them")
    add("overrides", nargs="*", metavar="key=value", help="laid upon the config, as run.name=tuned")
    add("--format", metavar="FORMAT", help="of the weights (default: the one that fits best)")
    add("--nproc", type=_ranks, default=1, metavar="N", help="ranks that share the work and the memory")
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """The exit code. Under a launcher (RANK is set) this process is a rank, and does not return."""
    if "RANK" in os.environ:
        from mm_core.runtime.launch.rank_process import leave, run_as_rank

        leave(run_as_rank(lambda: _import(args, _config(args))))
    config = _config(args)  # every typo is found before a rank is started
    if not Path(args.path).exists():
        raise MMError("there is no such file or folder", where=args.path, accepted="a folder of weights")
    if args.nproc == 1:
        return _import(args, config)
    from mm_core.runtime.launch.launcher import COMMAND, Nodes, launch

    rank = ["import", "--from", args.path, "--config", args.config, *args.overrides]
    rank += ["--format", args.format] if args.format else []
    rank += ["--allow-code"] * args.allow_code
    return launch([*COMMAND, *rank], Nodes(args.nproc))


def _config(args: argparse.Namespace) -> RunConfig:
    from mm_core.config.load import load_config

    return load_config(args.config, args.overrides, allow_code=args.allow_code)


def _import(args: argparse.Namespace, config: RunConfig) -> int:
    from mm_core.interchange.import_weights import import_weights

    saved, notes = import_weights(config, Path(args.path), args.format)
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"mm: {note}", file=sys.stderr)
        command = " ".join(["mm-train", "--config", args.config, *args.overrides])
        print(f"{saved}: {command} begins with it", flush=True)
    return 0


def _ranks(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
