"""`mm train` and `mm-train`: check a config, plan the run, and train it on one or many ranks.

Nothing here imports torch before the config has been checked.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mm_core.cli.options import config_of, count, print_json, print_table, refuse_missing
from mm_core.cli.ranks import refuse_among_ranks
from mm_core.cli.training.launching import OF_LAUNCH, add_launch, hosts_of, launched, on_hosts
from mm_core.errors import MMError, plural

if TYPE_CHECKING:
    from mm_core.config.load import Fetch
    from mm_core.config.sections import RunConfig
    from mm_core.device.machines import Machine
    from mm_core.runtime.launch.signals import StopFlag
    from mm_core.telemetry.operators import Operator
    from mm_core.training.forecast.fit import Setting
    from mm_core.training.forecast.study import Study


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", required=True, metavar="YAML", help="the run's config file")
    add("overrides", nargs="*", metavar="key=value", help="override a config key, e.g. train.steps=10")
    add_launch(parser)
    _add_plan(parser.add_argument_group("plan").add_argument)
    add("--no-forecast", action="store_true", help="start without the forecast, also where nothing fits")
    add(
        "--resume",
        default="auto",
        metavar="auto|last|PATH|never",
        help="checkpoint to resume from; auto (the default): the run's newest complete one, if there is one;"
        " last: that one, which must be there",
    )
    add(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="accept a config change since the checkpoint: a key, a prefix of keys, or all; may be repeated",
    )
    add(
        "--allow-code",
        action="store_true",
        help="run code named by a stored run's config (passed as --config, or named by init_from), although"
        " you have not trained with that code before",
    )
    add("--stop-after", type=count, metavar="STEP", help="save and stop after this step, with exit code 75")
    add(
        "--overfit-one-batch",
        action="store_true",
        help="train every step on the first batch, to check that the model can learn at all",
    )
    add(
        "--verify-resume",
        type=count,
        metavar="K",
        help="train 2K steps, then K + K steps with a restart, in a temporary folder, and compare every bit",
    )
    parser.epilog = (
        "Exit codes: 0 trained; 1 an error; 2 the command line does not parse; 69 a rank, host, device or"
        " connection was lost; 75 saved and stopped on request (SIGTERM, SIGINT, SIGUSR1, SIGHUP) before the"
        " last step; 130 stopped by a second Ctrl-C; 128+n"
        " signal n killed a rank."
    )


def _add_plan(add: Callable[..., object]) -> None:
    add("--dry-run", action="store_true", help="print the plan of the run and stop")
    add("--on", metavar="MACHINE", help="with --dry-run: plan for 8xH100, 2x8xH100 (hosts), 1x24GB")
    add("--fit", action="store_true", help="with --dry-run: also show the fastest settings that fit")
    add("--calibrate", action="store_true", help="with --dry-run: measure this machine first")
    add("--strict", action="store_true", help="with --dry-run: exit code 1 if a file is missing")
    add("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    add("--ops", action="store_true", help="with --dry-run: also list operators of a forward and backward")
    add("--device", metavar="KIND", help="with --ops: how a kind of device runs each, where it is installed")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm train` and returns its exit code. Under a launcher (RANK is set) this process is a rank and
    does not return."""
    _refuse_contradictions(args)
    if args.overfit_one_batch:
        args.overrides.append("train.overfit_one_batch=true")  # ranks receive the overrides too
    if "RANK" in os.environ:
        if args.dry_run:
            return _dry_run_of_rank(args)
        _be_rank(args)
    if args.hostfile is not None:
        return on_hosts(args)
    least, most = hosts_of(args)
    nproc = None if args.nproc == "auto" else args.nproc
    config = config_of(args, fetch=_fetch(args))  # finds every typo before a rank is started
    if args.on is not None:
        from mm_core.device.machines import machine_of

        return _dry_run(config, machine_of(args.on), args)
    if nproc is None:
        from mm_core.runtime.launch.launcher import quiet_torch

        quiet_torch()
        from mm_core.device import device_count

        nproc = max(1, device_count())
    world = nproc * most
    if args.dry_run:
        from mm_core.device.machines import this_machine

        return _dry_run(config, this_machine(most, nproc), args)
    if args.verify_resume is not None:
        return _verify_resume(args, config, nproc, most)
    if world == 1 and not args.max_restarts:
        from mm_core.runtime.launch.rank_process import run_as_rank
        from mm_core.runtime.launch.signals import StopFlag

        with StopFlag(announce=True) as stop:
            return run_as_rank(lambda: _train(args, stop, config))
    return launched(args, config, nproc, least, most)


def _fetch(args: argparse.Namespace) -> Fetch:
    """What a run fetches of its names on the hub: for a plan only configs."""
    if args.dry_run:
        return "configs"
    if args.resume in ("auto", "last"):
        return True
    return "anew" if args.resume == "never" else Path(args.resume).resolve()


def _be_rank(args: argparse.Namespace) -> NoReturn:
    from mm_core.runtime.launch.launch_folder import LAUNCH_DIR
    from mm_core.runtime.launch.rank_process import leave, run_as_rank
    from mm_core.runtime.launch.signals import StopFlag

    refuse_among_ranks(args, [*OF_LAUNCH, "verify_resume"])
    # mm-train reports a received signal for its ranks; under torchrun rank 0 does. The handlers stay
    # installed to the end: torch's agent signals a rank whose peers have exited.
    announce = os.environ["RANK"] == "0" and LAUNCH_DIR not in os.environ
    with StopFlag(announce=announce) as stop:
        leave(run_as_rank(lambda: _train(args, stop)))


def _train(args: argparse.Namespace, stop: StopFlag, config: RunConfig | None = None) -> int:
    from mm_core.runtime.launch.restarts import restarts_of
    from mm_core.runtime.launch.signals import STOPPED
    from mm_core.training.run import train

    config = config or config_of(args, fetch=_fetch(args))
    result = train(
        config,
        resume=args.resume,
        stop=stop,
        allow=args.allow,
        stop_after=args.stop_after,
        forecast=not args.no_forecast,
    )
    if os.environ.get("RANK", "0") == "0":
        state = f"stopped by {result.stopped} after" if result.stopped else "done:"
        ended = f"{state} step {result.step} of {result.steps}"
        if result.step is None:
            ended = f"stopped by {result.stopped} before the first step"
        restarts = len(restarts_of(result.run_dir))
        times = f"; {plural(restarts, 'restart')}" if restarts else ""
        print(f"{ended}{times}; run folder {result.run_dir}", flush=True)
    return STOPPED if result.stopped else 0


def _verify_resume(args: argparse.Namespace, config: RunConfig, nproc: int, hosts: int) -> int:
    """Exit code 0 if the resumed run equals the uninterrupted run bit for bit, else 1."""
    from mm_core.training.verify_resume import render, verify_resume

    if hosts > 1:
        raise MMError("--verify-resume runs on one host only", where="--nnodes", accepted="1")
    steps = args.verify_resume
    results, remarks = verify_resume(
        args.config, args.overrides, steps, nproc, config.run.name, args.allow_code
    )
    print(render(results, remarks))
    same = not remarks and all(result.ok for result in results)
    verdict = "equals the uninterrupted run" if same else "DIFFERS from the uninterrupted run"
    print(f"{steps} + {steps} steps on {plural(nproc, 'rank')}: the resumed run {verdict}")
    return 0 if same else 1


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context without garbage collection, which takes a tenth of a dry run's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def _dry_run(config: RunConfig, machine: Machine, args: argparse.Namespace) -> int:
    from mm_core.checkpoint.reading import adapters_begun
    from mm_core.fetching import planned
    from mm_core.plan import base_choices, build_task, plan_shown, table_of
    from mm_core.training.forecast.study import Study

    world = machine.world
    adapters = adapters_begun(config.train.adapters, config.run.folder)
    plan, samples = plan_shown(config, world, build_task(config, adapters))
    study = Study(config, plan, machine, samples, adapters)
    found = study.forecast(args.calibrate)
    wanted = planned(config.hub.values())
    absent = [str(use.name.path) for use in config.hub.values()]
    here = [file for file in plan.missing if not file.path.startswith(tuple(absent))]
    plan = replace(plan, missing=tuple(here))
    choices = base_choices(config, world, adapters)
    unread = any(file.of_data for file in plan.missing)
    operators = _operators(config, args.device) if args.ops and not unread else None
    if args.json:
        document = plan.to_mapping() | {"forecast": found.to_mapping()}
        document["hub"] = [each.to_mapping() for each in wanted]
        if args.fit:
            settings, _ = _settings(args, study)
            document["fit"] = [asdict(each) | {"forecast": each.forecast.to_mapping()} for each in settings]
        document["base_choices"] = [asdict(choice) for choice in choices]
        if operators is not None:
            document["operators"] = [asdict(each) for each in operators]
        print_json(document)
        return int(args.strict and bool(plan.files_to_start))
    lines = [plan.render(), *(["", *table_of(choices)] if choices else []), "", *found.render()]
    print("\n".join([*lines, *(["", *(each.render() for each in wanted)] if wanted else [])]))
    if args.fit:
        from mm_core.training.forecast.fit import shown

        settings, least = _settings(args, study)
        print("\n".join(["", *shown(settings, machine, least)]))
    if operators is not None:
        from mm_core.telemetry.operators import table

        print("\noperators of a forward and backward of one micro-batch, as the CPU runs them")
        print_table(table(operators))
    elif args.ops:
        print("\nthe operators are known once the data are present")
    if args.strict:
        refuse_missing(plan.files_to_start)
    return 0


def _settings(args: argparse.Namespace, study: Study) -> tuple[list[Setting], int]:
    from mm_core.config.load import load_config
    from mm_core.training.forecast.fit import Search

    fixed = [override.partition("=")[0].lstrip("+~") for override in args.overrides]

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(args.config, [*more, *args.overrides], allow_code=args.allow_code)

    search = Search(load, fixed, study)
    return search.settings(), search.least


def _operators(config: RunConfig, device: str | None) -> list[Operator]:
    from mm_core.telemetry.operators import listed
    from mm_core.training.optional.operators import first_forward, operators_of

    return listed(operators_of(first_forward(config)), device)


def _dry_run_of_rank(args: argparse.Namespace) -> int:
    """The first rank of a launcher's ranks prints the plan; nothing is trained."""
    from mm_core.device import environment_world
    from mm_core.device.machines import launched_machine

    config = config_of(args, fetch=_fetch(args))
    return _dry_run(config, launched_machine(), args) if environment_world().rank == 0 else 0


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raises MMError for options that contradict each other: one of them would be ignored silently."""
    options = {
        "--dry-run": args.dry_run,
        "--resume": args.resume != "auto",
        "--allow": bool(args.allow),
        "--stop-after": args.stop_after is not None,
    }
    given = [name for name, there in options.items() if there]
    what, hint = None, "remove one of these options"
    if args.verify_resume is not None and given:
        what = (
            f"{', '.join(given)} cannot be used with --verify-resume, which trains from scratch in a"
            " temporary folder and stops by itself"
        )
    elif args.resume == "never" and args.allow:
        what = (
            "--allow cannot be used with --resume never: --allow accepts changes since a checkpoint, and none"
            " is read"
        )
    elif args.json and not args.dry_run:
        what, hint = "--json works only with --dry-run, whose plan it prints as JSON", "add --dry-run"
    elif args.on and (not args.dry_run or args.nproc is not None or args.nnodes is not None):
        what = "--on gives the ranks of a plan: it works with --dry-run, without --nproc and --nnodes"
        hint = "mm-train --config FILE --dry-run --on 8xH100"
    elif args.fit and not args.dry_run:
        what, hint = "--fit works only with --dry-run: it trains nothing", "add --dry-run"
    elif args.calibrate and (not args.dry_run or args.on is not None):
        what, hint = "--calibrate measures this machine, in a dry run of it", "add --dry-run, and remove --on"
    elif args.no_forecast and args.dry_run:
        what = "--no-forecast is for a run that starts; --dry-run prints the forecast"
    elif args.strict and not args.dry_run:
        what, hint = "--strict works only with --dry-run: no run starts without its files", "add --dry-run"
    elif (args.ops and not args.dry_run) or (args.device and not args.ops):
        what, hint = "--ops works only with --dry-run, and --device with --ops", "add --dry-run --ops"
    elif args.hostfile and (args.dry_run or args.verify_resume or args.nproc or args.node_rank):
        what = "--hostfile starts a run with the ranks that it lists: it goes without --nproc, --node-rank,"
        what += " --dry-run and --verify-resume"
    if what is not None:
        raise MMError(what, where="command line", hint=hint)
