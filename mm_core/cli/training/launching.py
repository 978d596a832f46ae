"""How many ranks `mm train` starts, on which hosts, and how often they start again."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import config_of, count, whole
from mm_core.cli.ranks import rank_command
from mm_core.errors import MMError, PlanError, plural

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig
    from mm_core.runtime.launch.meeting import Nodes
    from mm_core.runtime.launch.restarts import Tries

OF_LAUNCH = ("nproc", "nnodes", "rdzv_endpoint", "rdzv_id", "node_rank", "max_restarts", "hostfile")
"""Options that set how many ranks run, on which hosts, and how often they start again."""


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `OF_LAUNCH` to a command's parser."""
    add = parser.add_argument_group("ranks and hosts").add_argument
    auto = "ranks on this host; auto (the default): one per accelerator, 1 on CPU"
    add("--nproc", type=ranks, metavar="N|auto", help=auto)
    add("--nnodes", metavar="N|MIN:MAX", help="hosts (default 1); run the command on each of them")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="rendezvous address; must be the same on all hosts")
    add("--rdzv-id", metavar="ID", help="rendezvous id; must be the same on all hosts")
    own_rank = "rank of this host (0 = the rendezvous host); only needed if it cannot be detected"
    add("--node-rank", metavar="N", help=own_rank)
    again = "start the ranks again from the newest checkpoint after a failure that passes, at most N times"
    add("--max-restarts", type=whole, metavar="N", help=again)
    add("--hostfile", metavar="FILE", help="start by ssh on each host of its lines: HOST slots=N")


def ranks(text: str) -> int | str:
    """Parses --nproc of `mm train`; `auto`: one rank per accelerator."""
    try:
        return text if text == "auto" else count(text)
    except ValueError:
        accepted = "accepted: 1, 2, ... or auto"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; {accepted}") from None


def launched(args: argparse.Namespace, config: RunConfig, nproc: int, least: int, most: int) -> int:
    """Starts the ranks of this host, and returns the exit code of the launch."""
    from mm_core.runtime.launch.hosts import BY_HOSTFILE, check_name
    from mm_core.runtime.launch.launcher import launch, quiet_torch
    from mm_core.runtime.launch.meeting import Nodes
    from mm_core.runtime.launch.restarts import Decision, record

    quiet_torch()  # before anything else imports it
    if least < most:
        check_hosts(config, nproc, least, most)
    is_rendezvous_host = None if args.node_rank is None else args.node_rank == "0"
    nodes = Nodes(nproc, least, most, args.rdzv_endpoint, args.rdzv_id, is_rendezvous_host)
    tries, last, by_hostfile = _tries(args, config, nodes), None, os.environ.pop(BY_HOSTFILE, None)
    try:
        if nodes.endpoint is not None:
            check_name(nodes.endpoint.rpartition(":")[0])
    except MMError as fault:
        if by_hostfile is not None:
            raise
        print(f"mm-train: {fault.what}: waiting for it", file=sys.stderr)  # in a cluster it may come
    if restart := json.loads(by_hostfile or "null"):
        hosts = restart.pop("hosts")
        last = Decision(**restart | {"step": tries.newest()})
        if is_rendezvous_host:  # its disk has the run, which the command with the hostfile may not reach
            record(config.run.folder, last, hosts, lasted=0.0)
    return launch(rank_words(args), nodes, tries=tries, last=last)


def on_hosts(args: argparse.Namespace) -> int:
    """Starts this command by ssh on each host of --hostfile, and returns the exit code of the launch."""
    from mm_core.runtime.launch.hosts import port_of, read_hosts, run_on_hosts

    hosts, run_id = read_hosts(Path(args.hostfile)), args.rdzv_id or f"mm-{uuid.uuid4().hex[:12]}"
    args.nnodes = args.nnodes or str(len(hosts))
    args.rdzv_endpoint = args.rdzv_endpoint or f"{hosts[0].name}:{port_of(run_id)}"
    least, most = hosts_of(args)
    if most != len(hosts):
        what = f"{plural(most, 'host')}, and {args.hostfile} lists {len(hosts)}"
        raise MMError(what, where="--nnodes", hint="remove it")
    config_of(args, fetch="configs")  # finds every typo before a host is asked
    meeting = ["--nnodes", args.nnodes, "--rdzv-endpoint", args.rdzv_endpoint]
    restarts = args.max_restarts or 0
    again = ["--max-restarts", str(restarts)] if restarts else []
    return run_on_hosts(hosts, [*rank_words(args), *meeting, *again], run_id, least, restarts)


def rank_words(args: argparse.Namespace) -> list[str]:
    """The command line of a rank."""
    return rank_command("train", args, (*OF_LAUNCH, "overfit_one_batch"))


def _tries(args: argparse.Namespace, config: RunConfig, nodes: Nodes) -> Tries:
    from mm_core.checkpoint.retention import complete_steps
    from mm_core.checkpoint.run_manifest import launch_facts
    from mm_core.runtime.launch.restarts import Tries

    folder = config.run.folder

    def newest() -> int | None:
        return max(complete_steps(folder / "checkpoints"), default=None)

    def again(saved: bool) -> list[str]:
        """A restart resumes from the run's own checkpoint, once it has one, and not from another run's."""
        own = "auto" if saved or args.resume == "last" else args.resume
        return rank_words(argparse.Namespace(**vars(args) | {"resume": own}))

    facts: dict[str, str] = {}
    if nodes.endpoint is not None:
        shared = ("nnodes", "max_restarts", "resume", "stop_after", "allow")
        options = {f"--{name.replace('_', '-')}": str(vars(args)[name]) for name in shared}
        alike = {"--nproc": str(nodes.nproc)} if nodes.least < nodes.most else {}
        facts = launch_facts(config) | options | alike
    return Tries(args.max_restarts or 0, folder, newest, facts, again)


def check_hosts(config: RunConfig, nproc: int, least: int, most: int) -> None:
    """Raises MMError if a step would not have the same samples on any number of hosts."""
    from mm_core.plan import build_task, make_plan

    if config.train.global_batch_size is None:
        what = "the number of hosts may change, so a step needs a number of samples that does not"
        hint = "set train.global_batch_size to a number that all of them divide"
        raise MMError(what, where="train.global_batch_size", hint=hint)
    task = build_task(config)
    for hosts in range(least, most + 1):
        try:
            make_plan(config, nproc * hosts, task)
        except PlanError as fault:
            where = f"on {plural(hosts, 'host')}: {fault.where}"
            raise PlanError(fault.what, where=where, accepted=fault.accepted, hint=fault.hint) from None


def hosts_of(args: argparse.Namespace) -> tuple[int, int]:
    """The smallest and largest number of hosts."""
    text = args.nnodes or "1"
    hosts = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if hosts is None or int(hosts[2] or hosts[1]) < int(hosts[1]):
        raise MMError(f"{text!r} is not a number of hosts", where="--nnodes", accepted="N or MIN:MAX")
    least, most = int(hosts[1]), int(hosts[2] or hosts[1])
    if most > 1 and not args.rdzv_endpoint:
        raise MMError(
            f"{plural(most, 'host')} need a rendezvous address",
            where="--rdzv-endpoint",
            accepted="HOST:PORT, the same on all hosts",
        )
    address = re.fullmatch(r"\S+:(\d+)", args.rdzv_endpoint) if args.rdzv_endpoint else None
    if args.rdzv_endpoint and (address is None or int(address[1]) not in range(1, 2**16)):
        accepted = "HOST:PORT, a port from 1 to 65535"
        raise MMError(f"{args.rdzv_endpoint!r} is not an address", where="--rdzv-endpoint", accepted=accepted)
    if args.node_rank is not None and not re.fullmatch(r"\d+", args.node_rank):
        raise MMError(
            f"{args.node_rank!r} is not the rank of a host", where="--node-rank", accepted="0, 1, 2, ..."
        )
    if args.nnodes is None and (args.rdzv_endpoint or args.node_rank):
        given = "--rdzv-endpoint" if args.rdzv_endpoint else "--node-rank"
        what = f"{given} is of a launch on several hosts: this one would train alone"
        raise MMError(what, where="--nnodes", accepted="N or MIN:MAX", hint=f"add it, or remove {given}")
    return least, most
