"""Plan, data, engine and restored state of a run: everything before its first step."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.run_manifest import check_plugins, run_manifest
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.dump import to_yaml
from mm_core.config.sections import RunConfig
from mm_core.contracts import Dataset, Engine, Randomness, SupportsLengths, TaskModule, seeded
from mm_core.data.class_names import check_class_names
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.loading.seeding import build_dataset
from mm_core.data.loading.skipped import SkipLedger
from mm_core.errors import CheckpointError, ContractError, PlanError
from mm_core.evaluation.validator import Validator, build_metrics, default_settings
from mm_core.files import replace_text
from mm_core.loading.frozen import load_frozen_of
from mm_core.loading.initial_weights import FileWeights, ResumedWeights
from mm_core.loading.known_code import check_commands, remember
from mm_core.loading.left_out import ExternalWeights
from mm_core.loading.run_adapters import task_of
from mm_core.optim.ema import EMA
from mm_core.optim.parameter_groups import groups_of
from mm_core.plan import RunPlan, check_data, make_plan, sample_order
from mm_core.runtime.launch.rank_logs import current_log
from mm_core.runtime.launch.signals import StopFlag
from mm_core.runtime.launch.watchdog import Watchdog
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.profiler import ProfileWindow
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.between_steps import BetweenSteps
from mm_core.training.callback_list import CallbackList
from mm_core.training.evaluating import Evaluating
from mm_core.training.guard import UpdateGuard
from mm_core.training.loop import Training
from mm_core.training.non_finite import first_non_finite
from mm_core.training.restore import Restored, restore
from mm_core.training.saving import Saving, best_metric
from mm_core.weights.adapters.record import record_of


@dataclass(frozen=True)
class OpenedRun:
    """A run before anything of it is built.

    Attributes:
        folder: of the run.
        store: its checkpoints; no other process writes to them now.
        source: the checkpoint that it goes on from; None begins anew.
        refused: damaged checkpoints that were passed over for an older one.
    """

    config: RunConfig
    folder: Path
    ranks: Ranks
    store: CheckpointStore
    source: OpenedCheckpoint | None
    refused: list[CheckpointError]


@dataclass(frozen=True)
class RunParts:
    """What a run computes with.

    Attributes:
        weights: that it begins with.
        external: what checkpoints leave to the files that it came from.
    """

    task: TaskModule
    engine: Engine
    datasets: Mapping[str, Dataset]
    plan: RunPlan
    weights: ResumedWeights | FileWeights
    external: ExternalWeights
    ema: EMA | None


@dataclass
class Assembly:
    """A run ready to step: what `assemble` returns. start: steps already taken."""

    folder: Path
    training: Training
    between: BetweenSteps
    reporter: RunReporter
    ledger: SkipLedger
    start: int


def assemble(
    config: RunConfig, resume: str = "auto", stop: StopFlag | None = None, allow: Sequence[str] = ()
) -> Assembly:
    """Everything before the first step, within a process group: the checkpoint, the parts, their restored
    state, and what watches over them. Called by all ranks.

    Args:
        resume, allow: as of `train`.
        stop: notes signals; None for a run that no signal stops.
    """
    store = make_store(config)
    with ExitStack() as undo:
        undo.callback(store.close, after_fault=True)  # so that the run's folder is free for another call
        run = open_run(config, store, resume)
        parts = build_parts(run)
        manifest, restored = restore_parts(run, parts, allow)
        ready = equip(run, parts, manifest, restored, stop or StopFlag(), undo)
        undo.pop_all()
        return ready


def open_run(config: RunConfig, store: CheckpointStore, resume: str) -> OpenedRun:
    """Checks that the ranks run the same code, and finds the checkpoint that the run goes on from."""
    check_plugins(config)
    check_commands(config)
    source, refused = store.open(resume)
    return OpenedRun(config, config.run.folder, Ranks.current(), store, source, refused)


def build_parts(run: OpenedRun) -> RunParts:
    """Task, engine, data and plan. Weights are loaded from files or drawn; what a checkpoint holds follows in
    `restore_parts`."""
    config, registry = run.config, run.config.registry
    task = task_of(config, run.source)
    engine: Engine = registry.build("engine", config.engine)
    check_data(config, task)  # before any is measured
    datasets: dict[str, Dataset] = {
        name: build_dataset(registry, section, config.run.seed)
        for name, section in config.data.splits.items()
    }
    check_class_names(task, datasets)
    plan = make_plan(config, run.ranks.count, task, engine, len(datasets["train"]))
    if missing := [file.path for file in plan.missing if file.needed == "to train"]:
        raise PlanError(
            f"files of frozen components are missing: {', '.join(missing)}",
            where="task",
            hint="download them, or point from_pretrained at the folder that holds them",
        )
    load_frozen_of(task, engine, plan.engine, config)
    weights = (
        ResumedWeights(run.source, config, task) if run.source is not None else FileWeights(config, task)
    )
    engine.prepare(task, plan.engine, partial(make_optimizer, config), Randomness(config.run.seed), weights)
    ema = EMA(dict(engine.named_parameters()), config.ema) if config.ema is not None else None
    return RunParts(task, engine, datasets, plan, weights, weights.left_out(), ema)


def restore_parts(run: OpenedRun, parts: RunParts, allow: Sequence[str]) -> tuple[Document, Restored]:
    """Fills the parts from the run's checkpoint, if there is one, and writes what the run is made of: its
    manifest, which a resume compares."""
    config, plan, weights = run.config, parts.plan, parts.weights
    adapters = record_of(parts.task, config.train.adapters)
    external = parts.external.rows(config.literals)
    manifest = run_manifest(config, plan, parts.datasets, adapters, external)
    absent = weights.absent.names if isinstance(weights, ResumedWeights) else ()
    restored = restore(
        run.store, run.source, run.refused, parts.engine, parts.ema, manifest, allow, plan.steps, absent
    )
    restored.notes += [*weights.notes(), *plan.notes]
    run.ranks.on_first(
        "writing config.yaml and manifest.json", lambda: write_run_files(run.folder, config, plan, manifest)
    )
    if run.ranks.rank == 0 and (note := remember(config)) is not None:
        restored.notes.append(note)
    return manifest, restored


def equip(
    run: OpenedRun, parts: RunParts, manifest: Document, restored: Restored, stop: StopFlag, undo: ExitStack
) -> Assembly:
    """Adds what reads, watches, measures, evaluates and saves."""
    config, plan, task, engine = run.config, parts.plan, parts.task, parts.engine
    watchdog = Watchdog(
        run.folder, run.ranks.rank, plan.engine.world, config.run.stuck_after, log=current_log()
    )
    reporter = make_reporter(run, parts, restored, watchdog)
    undo.callback(reporter.close, "failed")
    order, loader = make_loader(config, plan, parts.datasets["train"], task, restored.step, engine.device)
    ledger = SkipLedger(run.folder, config.data.loader.max_failed_share)
    guard = make_guard(config, parts, restored, reporter)
    callbacks = CallbackList([(c.type, config.registry.build("callback", c)) for c in config.callbacks])
    facts = partial(facts_of, parts, restored, config.run.seed, order, reporter, guard)
    between = BetweenSteps(
        run_dir=run.folder,
        steps=plan.steps,
        saving=Saving(
            config=config,
            store=run.store,
            state=partial(state_of, engine, parts.ema, parts.external.names),
            facts=facts,
            config_yaml=to_yaml(config),
            manifest=manifest,
            reporter=reporter,
            callbacks=callbacks,
        ),
        evaluating=make_evaluating(run, parts, reporter, callbacks, stop),
        flag=stop,
        reporter=reporter,
        callbacks=callbacks,
        profile=ProfileWindow(config.profile, run.folder, run.ranks.rank),
        watchdog=watchdog,
        ema=parts.ema,
        evaluated=bool(restored.facts.get("evaluated", True)),
    )
    training = Training(
        plan=plan,
        task=task,
        engine=engine,
        batches=ledger.watch(loader),
        lr_schedule=config.registry.build("lr_schedule", config.lr_schedule, plan.steps, engine.base_lr),
        rng=Randomness(config.run.seed),
        guard=guard,
        reporter=reporter,
        between=between,
        clip_grad_norm=config.train.clip_grad_norm,
    )
    return Assembly(run.folder, training, between, reporter, ledger, restored.step)


def make_reporter(run: OpenedRun, parts: RunParts, restored: Restored, watchdog: Watchdog) -> RunReporter:
    """What logs and shows, which has told the notes of the beginning."""
    reporter = RunReporter(
        run.folder,
        run.config,
        parts.plan,
        restored.step,
        restored.facts.get("samples", 0.0),
        bins=parts.task.bins,
        watch=watchdog.enter,
    )
    for sentence in restored.notes:
        reporter.note(sentence)
    return reporter


def make_guard(config: RunConfig, parts: RunParts, restored: Restored, reporter: RunReporter) -> UpdateGuard:
    """What judges each step's gradients, with what it has seen before."""
    roots = parts.task.trainable
    return UpdateGuard(
        config.train,
        restored.facts.get("guard"),
        locate=lambda rerun: first_non_finite(parts.task, roots, rerun, parts.engine.discard),
        warn=reporter.note,
    )


def make_evaluating(
    run: OpenedRun, parts: RunParts, reporter: RunReporter, callbacks: CallbackList, stop: StopFlag
) -> Evaluating:
    """The validators of the run's held-out data."""
    config = run.config
    samples = config.validation is not None and config.validation.samples is not None

    def validator(split: str) -> Validator | None:
        held_out, clips = parts.datasets.get(split), samples and split == "validation"
        if held_out is None and not clips:
            return None
        made = Validator(
            config,
            parts.task,
            parts.engine,
            held_out,
            run_dir=run.folder,
            split=split,
            metrics=build_metrics(config.registry, default_settings(config, split)),
            ema=parts.ema,
            stop=lambda: stop.requested is not None,
            enter=reporter.enter,
            note=reporter.note,
            log=reporter.log,
            show=reporter.clips,
        )
        if clips:
            made.check_samples()
        return made

    return Evaluating(config, run.folder, reporter, callbacks, validator("validation"), validator("test"))


def make_optimizer(config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over what the engine trains."""
    optimizer: torch.optim.Optimizer = config.registry.build(
        "optimizer", config.optimizer, groups_of(parameters, config.train)
    )
    return optimizer


def sample_lengths(config: RunConfig, dataset: Dataset) -> Tensor | None:
    """What batches are grouped by; None where they are not. PlanError for a dataset that does not know."""
    if not config.data.loader.group_by_length:
        return None
    if not isinstance(dataset, SupportsLengths):
        raise PlanError(
            f"{type(dataset).__name__} does not say how long its samples are",
            where="data.loader.group_by_length",
            accepted="datasets with a method lengths(), as text_rows has",
            hint="leave group_by_length out: samples of one size have nothing to gain",
        )
    with seeded(Randomness(config.run.seed).at("lengths")):  # every rank has to sort by the same
        lengths = dataset.lengths()
    if lengths.shape != (len(dataset),):
        raise ContractError(
            f"{type(dataset).__name__}.lengths() gives {list(lengths.shape)} for {len(dataset)} samples",
            where="data.train",
            accepted="one length a sample",
        )
    return lengths


def make_loader(
    config: RunConfig, plan: RunPlan, dataset: Dataset, task: TaskModule, start: int, device: torch.device
) -> tuple[BatchPlan, MicroBatchLoader]:
    """The order of the samples, and this rank's micro-batches from step `start` to the end."""
    section = config.data.loader
    order = sample_order(config, plan.global_batch_size, len(dataset), sample_lengths(config, dataset))
    return order, MicroBatchLoader(
        dataset,
        order,
        batch_transform=task.batch_transform(),
        rng=Randomness(config.run.seed),
        rank=Ranks.current().rank,
        data_parallel=plan.engine.data_parallel,
        start_step=start,
        end_step=plan.steps,
        workers=section.workers,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        device_type=device.type,
    )


def make_store(config: RunConfig) -> CheckpointStore:
    """The run's checkpoints, as its config wants them."""
    section = config.checkpoint
    return CheckpointStore(
        config.run.folder,
        section.keep,
        keep_every=section.keep_every,
        best=best_metric(config),
        mode=section.mode,
        asynchronous=section.async_,
    )


def state_of(engine: Engine, ema: EMA | None, left_out: Collection[str] = ()) -> State:
    """The tensors of a checkpoint: live ones, not copies. left_out: of the model."""
    state = engine.state_dict()
    state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in left_out}
    return {**state, **({"ema": ema.state_dict()} if ema is not None else {})}


def facts_of(
    parts: RunParts,
    restored: Restored,
    seed: int,
    order: BatchPlan,
    reporter: RunReporter,
    guard: UpdateGuard,
) -> Document:
    """What a checkpoint holds beside its tensors; where the data stood is a function of the step."""
    return {
        **({"imported": imported} if (imported := restored.facts.get("imported")) is not None else {}),
        "seed": seed,
        "samples": reporter.window.samples_seen,
        "order": order.facts(),
        "world": parts.plan.engine.world,
        "guard": guard.state(),
        "ema_updates": parts.ema.updates if parts.ema is not None else 0,
    }


def write_run_files(run_dir: Path, config: RunConfig, plan: RunPlan, manifest: Document) -> None:
    """config.yaml (every default filled) and manifest.json."""
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {**manifest, "plan": plan.to_mapping()}
    for name, text in (("config.yaml", to_yaml(config)), ("manifest.json", json.dumps(document, indent=2))):
        replace_text(run_dir / name, text + "\n" * (not text.endswith("\n")))
