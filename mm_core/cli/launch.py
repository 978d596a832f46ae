"""`mm launch slurm|kubernetes`: prints a file for a cluster's scheduler, which a person can read and edit."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import add_allow_code, config_of, count, whole
from mm_core.errors import ConfigError, MMError, PlanError, plural, printable

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig

_GRACE = {"slurm": 300, "kubernetes": 600}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="slurm|kubernetes")
    slurm = actions.add_parser("slurm", help="a batch script, for sbatch", allow_abbrev=False)
    kubernetes = actions.add_parser(
        "kubernetes", help="an indexed Job, for kubectl apply", allow_abbrev=False
    )
    for each, seconds in zip((slurm, kubernetes), _GRACE.values(), strict=True):
        _add_shared(each, seconds)
    add = slurm.add_argument
    limit = "time limit of one job, as MINUTES, HH:MM:SS or D-HH:MM:SS; requeued until the run has ended"
    add("--time", metavar="LIMIT", help=limit)
    more = "further line for sbatch, e.g. partition=long; replaces a line of the same key; may be repeated"
    add("--sbatch", action="append", default=[], metavar="KEY=VALUE", help=more)
    add("--no-gres", action="store_true", help="ask for no devices, where Slurm does not know them")
    add = kubernetes.add_argument
    add("--image", required=True, metavar="NAME", help="container image with mm_core and the run's plugins")
    add(
        "--claim",
        default="runs",
        metavar="NAME",
        help="PersistentVolumeClaim for runs and data (default runs)",
    )
    add("--namespace", metavar="NAME", help="namespace (default: that of kubectl)")
    add("--shm", default="16Gi", metavar="SIZE", help="size of /dev/shm (default 16Gi)")


def _add_shared(parser: argparse.ArgumentParser, grace: int) -> None:
    from mm_core.device.resources import RESOURCES

    kinds = {kind: resource.devices for kind, resource in RESOURCES.items()}
    add = parser.add_argument
    add("--config", required=True, metavar="YAML", help="the run's config file")
    add("overrides", nargs="*", metavar="key=value", help="override a config key, e.g. train.steps=10")
    add("--nodes", type=count, default=1, metavar="N", help="hosts (default 1)")
    add("--device", choices=kinds, default=next(iter(kinds)), help="kind of device (default %(default)s)")
    devices = ", ".join(f"{number} of {kind}" for kind, number in kinds.items())
    add("--nproc", type=count, metavar="N", help=f"ranks, and devices, of each host (default {devices})")
    add("--grace", type=count, default=grace, metavar="SECONDS", help="time for a save (default %(default)s)")
    add("--max-restarts", type=whole, default=0, metavar="N", help="as for mm-train (default 0)")
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs `mm launch`: checks and plans the run, then prints the file."""
    from mm_core.device.resources import RESOURCES
    from mm_core.runtime.submit import Submission
    from mm_core.runtime.submit.kubernetes import Place, kubernetes_file
    from mm_core.runtime.submit.slurm import slurm_file

    nproc = args.nproc or RESOURCES[args.device].devices
    config = _checked(args, nproc)
    command = printable(f"mm {shlex.join(sys.argv[1:])}")
    job = Submission(config, command, args.nodes, nproc, args.device, args.grace, args.max_restarts)
    if args.action == "kubernetes":
        for key, text in config.literals.items():
            print(f"mm: {key} is {text}: give the pods that variable, under env of the file", file=sys.stderr)
        print(kubernetes_file(job, Place(args.image, args.claim, args.shm, args.namespace)), end="")
        return 0
    print(slurm_file(job, _train(args), args.time, args.sbatch, not args.no_gres), end="")
    return 0


def _train(args: argparse.Namespace) -> list[str]:
    """The command that trains, by the interpreter of this one: a job may have another PATH."""
    program = Path(sys.executable).with_name("mm-train")
    train = [str(program) if program.exists() else program.name, f"--config={args.config}", *args.overrides]
    return [*train, "--allow-code"] if args.allow_code else train


def _checked(args: argparse.Namespace, nproc: int) -> RunConfig:
    """The run's config, once it could be planned. Files that are missing here may be on the hosts."""
    from mm_core.config.components import absent_paths
    from mm_core.plan import build_task, plan_shown

    config = config_of(args, fetch="configs")
    missing = absent_paths(config)
    try:
        plan_shown(config, args.nodes * nproc, build_task(config))
    except PlanError as fault:
        where = f"on {plural(args.nodes, 'host')} x {plural(nproc, 'rank')} (--nproc): {fault.where}"
        raise PlanError(fault.what, where=where, accepted=fault.accepted, hint=fault.hint) from None
    except MMError as error:
        if not missing or isinstance(error, ConfigError):
            raise
        print(f"mm: not planned, as files are missing here: {error.render()}", file=sys.stderr)
    for path in missing:
        print(f"mm: missing here: {path} (needed to train)", file=sys.stderr)
    return config
