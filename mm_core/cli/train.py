"""`mm train` and `mm-train`: check a config, plan it, and train it on one or many ranks."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import TYPE_CHECKING

from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.config.schema import RunConfig
    from mm_core.train.launch import Nodes


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--config", required=True, metavar="YAML", help="the run's config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid upon the config")
    parser.add_argument(
        "--nproc",
        default="auto",
        metavar="N|auto",
        help="ranks on this host (auto: one an accelerator, 1 on CPU)",
    )
    parser.add_argument("--nnodes", default="1", metavar="N|MIN:MAX", help="hosts (default 1)")
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where hosts meet; the same on all of them"
    )
    parser.add_argument("--rdzv-id", metavar="ID", help="name of the meeting; the same on all hosts")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="with --dry-run: the plan as JSON")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|PATH|never",
        help="auto: the run's newest complete checkpoint",
    )


def execute(args: argparse.Namespace) -> int:
    """The exit code: 0 done, 1 an error, 75 saved and stopped on request."""
    if "RANK" in os.environ:
        from mm_core.train.failure import leave, run_as_rank

        leave(run_as_rank(lambda: _train(args)))
    from mm_core.config.load import load_config

    config = load_config(args.config, args.overrides)  # every typo is found before a rank is started
    nodes = _nodes(args)
    if args.dry_run:
        return _dry_run(config, nodes.nproc * nodes.most, args.json)
    if nodes.nproc * nodes.most == 1:
        return _train(args, config)
    from mm_core.train.launch import launch

    return launch(["train", "--config", args.config, *args.overrides, "--resume", args.resume], nodes)


def _train(args: argparse.Namespace, config: RunConfig | None = None) -> int:
    from mm_core.config.load import load_config
    from mm_core.train.run import train
    from mm_core.train.signals import STOPPED, StopFlag

    config = config or load_config(args.config, args.overrides)
    with StopFlag() as stop:
        result = train(config, resume=args.resume, stop=stop)
    if os.environ.get("RANK", "0") == "0":
        state = f"stopped by {result.stopped} after" if result.stopped else "done:"
        print(f"{state} step {result.step} of {config.train.steps}; run folder {result.run_dir}")
    return STOPPED if result.stopped else 0


def _dry_run(config: RunConfig, world: int, as_json: bool) -> int:
    from mm_core.plan import make_plan

    plan = make_plan(config, world)
    print(json.dumps(plan.to_mapping(), indent=2) if as_json else plan.render())
    return 0


def _nodes(args: argparse.Namespace) -> Nodes:
    from mm_core.train.launch import Nodes

    hosts = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", args.nnodes)
    if hosts is None or int(hosts[2] or hosts[1]) < int(hosts[1]):
        raise MMError(f"{args.nnodes!r} is not a number of hosts", where="--nnodes", accepted="N or MIN:MAX")
    least, most = int(hosts[1]), int(hosts[2] or hosts[1])
    if most > 1 and not args.rdzv_endpoint:
        raise MMError(
            f"{most} hosts need a place to meet",
            where="--rdzv-endpoint",
            accepted="HOST:PORT, the same on all hosts",
        )
    if args.nproc == "auto":
        from mm_core.device import device_count

        nproc = max(1, device_count())
    elif re.fullmatch(r"[1-9]\d*", args.nproc):
        nproc = int(args.nproc)
    else:
        raise MMError(
            f"{args.nproc!r} is not a number of ranks", where="--nproc", accepted="1, 2, ... or auto"
        )
    return Nodes(nproc, least, most, args.rdzv_endpoint, args.rdzv_id)
