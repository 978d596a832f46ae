"""`mm import`: writes weights files as the first checkpoint of a run."""

from __future__ import annotations

import argparse
import os
import sys

from mm_core.cli.options import add_allow_code, config_of
from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.errors import MMError, printable
from mm_core.fetching import local
from mm_core.hub import hint_for


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--from", required=True, metavar="DIR", help="a weights file, or a folder of them, or hub:org/name")
    add("--config", required=True, metavar="YAML", help="config of the run that starts from these weights")
    add("overrides", nargs="*", metavar="key=value", help="override a config key, e.g. run.name=tuned")
    add("--format", metavar="FORMAT", help="format of the weights (default: the one that matches best)")
    add_ranks(parser, ", and the work")
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs `mm import` and returns its exit code. Under a launcher (RANK is set) this process is a rank and
    does not return."""
    return on_ranks(args, "import", _import, _check)


def _check(args: argparse.Namespace) -> None:
    config_of(args, fetch=True)  # finds every typo before a rank is started
    path = local(vars(args)["from"])
    if not path.exists():
        raise MMError(
            "there is no such file or folder",
            where=str(path),
            accepted="a weights file, or a folder of them",
            hint=hint_for(path),
        )


def _import(args: argparse.Namespace) -> int:
    from mm_core.interchange.import_weights import import_weights

    saved, notes = import_weights(config_of(args, fetch=True), local(vars(args)["from"]), args.format)
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"mm: {printable(note)}", file=sys.stderr)
        command = " ".join(["mm-train", "--config", args.config, *args.overrides])
        print(f"{saved}: `{command}` starts from this checkpoint", flush=True)
    return 0
