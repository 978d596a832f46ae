"""A run from its config to its last checkpoint: what `mm-train` calls on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mm_core.config.dump import to_yaml
from mm_core.config.schema import RunConfig
from mm_core.contracts import Batch, Dataset, Engine, Randomness
from mm_core.data.loader import MicroBatchLoader, worker_death
from mm_core.data.sampler import BatchPlan
from mm_core.data.skipped import SkipLedger
from mm_core.device import device_stack, start_process_group
from mm_core.errors import PlanError
from mm_core.plan import RunPlan, build_task, make_plan, sample_order
from mm_core.plugin.registry import build, check_ranks_agree, get_registry
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.interim import PlainGuard, PlainMilestones, StopRequest
from mm_core.train.loop import Training, run_steps
from mm_core.train.parameter_groups import groups_of
from mm_core.train.reporting import RunReporter


@dataclass(frozen=True)
class RunResult:
    """Where a run ended. stopped: why it ended before its last step, or None."""

    run_dir: Path
    step: int
    stopped: str | None


@dataclass(frozen=True)
class NeverStop:
    """A run that no signal stops: the default of `train` when it is called as a library."""

    requested: str | None = None


def train(
    config: RunConfig, *, resume: str = "auto", stop: StopRequest | None = None, allow: Sequence[str] = ()
) -> RunResult:
    """Trains as the rank that the environment names (a lone process without a launcher).

    Args:
        config: a checked run, from `mm_core.load_config`.
        resume: `auto` (the newest complete checkpoint of the run, else from zero), `never`, or the
            path of a checkpoint or run directory.
        stop: asked after every step whether to save and end.

    Raises:
        MMError: ConfigError, PlanError, ContractError, DataError, CheckpointError, TrainingError;
            PeerError where another rank is the one to blame.
    """
    with process_group():
        return _train(config, resume, stop or NeverStop())


def _train(config: RunConfig, resume: str, stop: StopRequest) -> RunResult:
    run = assemble(config, resume, stop)
    try:
        step = run_steps(run.training, run.start)
        if run.ledger.path.exists():
            run.reporter.note(f"samples that could not be read were replaced; {run.ledger.path} lists them")
    except RuntimeError as error:
        # torch reports a dead data worker from a signal handler, wherever the process happens to be.
        if (death := worker_death(error)) is None:
            raise
        raise death from error
    finally:
        run.reporter.close()
    # One rank that was asked to stop stops all of them.
    reason = stop.requested or "a signal to another rank"
    return RunResult(run.folder, step, reason if step < run.training.plan.steps else None)


@dataclass
class Assembly:
    """A run ready to step: what `assemble` returns. start: steps already taken."""

    folder: Path
    training: Training
    reporter: RunReporter
    ledger: SkipLedger
    start: int


def assemble(config: RunConfig, resume: str = "auto", stop: StopRequest | None = None) -> Assembly:
    """Plan, data, engine, restored state: everything before the first step, within a process group."""
    check_plugins(config)
    rng = Randomness(config.run.seed)
    task = build_task(config)
    engine: Engine = build("engine", config.engine)
    plan = make_plan(config, dist.get_world_size(), task, engine)
    if plan.missing_files:
        raise PlanError(
            f"files of frozen components are missing: {', '.join(plan.missing_files)}",
            where="task",
            hint="download them, or point from_pretrained at the folder that holds them",
        )
    run_dir = Path(config.run.dir) / config.run.name
    store = CheckpointStore(run_dir, config.checkpoint.keep)
    source = store.resolve(resume)
    dataset: Dataset = build("dataset", config.data.train)
    order = sample_order(config, plan.global_batch_size, len(dataset))
    load_frozen(task, engine.device)
    engine.prepare(task, plan.engine, partial(make_optimizer, config), rng)
    facts: dict[str, Any] = restore(store, source, engine) if source else {"step": 0}
    start = int(facts["step"])
    store.begin(start)
    if dist.get_rank() == 0:
        write_run_files(run_dir, config, plan)
    dist.barrier()
    reporter = RunReporter(run_dir, config, plan, start, facts.get("samples", 0.0))
    if source is not None:
        reporter.note(f"resumed {source} at step {start} of {plan.steps}")
        for change in changed_order(facts.get("order", {}), order):
            reporter.note(f"warning: {change}: samples come in another order than they would have")
    transform = task.batch_transform()  # type: ignore[operator]
    loader = make_loader(config, plan, dataset, order, transform, start, engine.device)
    ledger = SkipLedger(run_dir, config.data.loader.max_failed_share)
    training = Training(
        plan=plan,
        task=task,  # type: ignore[arg-type]
        engine=engine,
        batches=ledger.watch(loader),
        lr_schedule=build("lr_schedule", config.lr_schedule, plan.steps, engine.base_lr),
        rng=rng,
        guard=PlainGuard(),
        report=reporter,
        milestones=PlainMilestones(
            plan.steps,
            config.checkpoint.every,
            partial(save, store, engine, config, plan, reporter, order),
            stop or NeverStop(),
        ),
        clip_grad_norm=config.train.clip_grad_norm,
    )
    return Assembly(run_dir, training, reporter, ledger, start)


def check_plugins(config: RunConfig) -> None:
    """PluginError, on every rank, when the ranks have other plugins or versions."""
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, get_registry(config.plugins.path).fingerprint_table())
    check_ranks_agree(tables)


def make_optimizer(config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over what the engine trains."""
    optimizer: torch.optim.Optimizer = build(
        "optimizer", config.optimizer, groups_of(parameters, config.train)
    )
    return optimizer


def make_loader(
    config: RunConfig,
    plan: RunPlan,
    dataset: Dataset,
    order: BatchPlan,
    transform: Callable[[Batch], Batch],
    start: int,
    device: torch.device,
) -> MicroBatchLoader:
    """This rank's micro-batches from step `start` to the end."""
    section = config.data.loader
    return MicroBatchLoader(
        dataset,
        order,
        batch_transform=transform,
        rng=Randomness(config.run.seed),
        rank=dist.get_rank(),
        data_parallel=plan.engine.data_parallel,
        start_step=start,
        end_step=plan.steps,
        workers=section.workers,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        device_type=device.type,
    )


@contextmanager
def process_group() -> Iterator[None]:
    """The default process group for the length of a run; one that the caller made is left alone."""
    if dist.is_initialized():
        yield
        return
    start_process_group()
    try:
        yield
        dist.barrier()
    except BaseException:
        if dist.get_world_size() == 1:  # among several, the others may wait in a collective for ever
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def restore(store: CheckpointStore, source: Path, engine: Engine) -> dict[str, Any]:
    """Loads model and optimizer in place; returns the checkpoint's facts."""
    facts = store.read_facts(source)
    state = engine.state_template(stepped=facts["step"] > 0)
    store.load(source, state)
    return facts


def changed_order(before: Mapping[str, Any], order: BatchPlan) -> list[str]:
    """What has changed since the checkpoint of all that decides which samples a step sees."""
    now = asdict(order)
    return [
        f"{key} was {before[key]} and is {now[key]}" for key in now if before.get(key, now[key]) != now[key]
    ]


def save(
    store: CheckpointStore,
    engine: Engine,
    config: RunConfig,
    plan: RunPlan,
    reporter: RunReporter,
    order: BatchPlan,
    step: int,
) -> Path:
    """One checkpoint: state, config, and where the data stood (a function of the step and its order)."""
    facts = {
        "step": step,
        "seed": config.run.seed,
        "samples": reporter.window.samples_seen,
        "order": asdict(order),
        "world": plan.engine.world,
        "plugins": plugin_table(plan),
    }
    path = store.save(step, engine.state_dict(), facts, to_yaml(config))
    reporter.note(f"saved {path}")
    reporter.pause()
    return path


def load_frozen(task: nn.Module, device: torch.device) -> None:
    """Weights of the frozen components, onto the device."""
    names: Sequence[str] = task.frozen  # type: ignore[assignment]
    for name in names:
        getattr(task, name).load(device)


def plugin_table(plan: RunPlan) -> list[dict[str, str]]:
    """The components of the run and the distributions that they come from."""
    return [asdict(component) for component in plan.components]


def write_run_files(run_dir: Path, config: RunConfig, plan: RunPlan) -> None:
    """config.yaml (every default filled) and manifest.json."""
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = {"plugins": plugin_table(plan), "devices": device_stack(), "plan": plan.to_mapping()}
    for name, text in (("config.yaml", to_yaml(config)), ("manifest.json", json.dumps(manifest, indent=2))):
        staged = run_dir / f".{name}.tmp"
        staged.write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")
        staged.replace(run_dir / name)
