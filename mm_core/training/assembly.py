"""Assembling a run before its first step: plan, data, engine and restored state."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.run_manifest import check_plugins, run_manifest
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.components import resume_marks
from mm_core.config.dump import to_yaml
from mm_core.config.sections import RunConfig
from mm_core.contracts import Engine, Randomness, TaskModule
from mm_core.data.class_names import check_class_names
from mm_core.data.loading.bucketed import BucketedSamples
from mm_core.data.loading.plain import AnyDataset, promise_of, rows_of
from mm_core.data.loading.sampler import Order
from mm_core.data.loading.seeding import build_split
from mm_core.data.loading.skipped import SkipLedger
from mm_core.data.loading.streams import TrainingStream
from mm_core.errors import CheckpointError, PlanError
from mm_core.evaluation.validator import Validator, build_metrics, default_settings
from mm_core.files import replace_text
from mm_core.loading.frozen import load_frozen_of
from mm_core.loading.initial_weights import FileWeights, ResumedWeights
from mm_core.loading.known_code import check_commands, remember
from mm_core.loading.left_out import ExternalWeights
from mm_core.loading.run_adapters import task_of
from mm_core.modules.quantised import check_in_files
from mm_core.optim.configured import make_lr_schedule, make_optimizer
from mm_core.optim.ema import EMA
from mm_core.plan import RunCache, RunPlan, check_data, in_buckets, in_cache, make_plan
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
from mm_core.training.late import with_late_steps
from mm_core.training.loop import Training
from mm_core.training.non_finite import first_non_finite
from mm_core.training.optional.caching import filled
from mm_core.training.restore import Restored, restore
from mm_core.training.saving import Saving, best_metric
from mm_core.training.training_samples import make_loader
from mm_core.weights.adapters.record import record_of


@dataclass(frozen=True)
class OpenedRun:
    """A training run whose checkpoint is chosen but whose parts are not built yet.

    Attributes:
        store: the run's checkpoints.
        source: the checkpoint to resume from; None for a new run.
        refused: errors about damaged checkpoints that were skipped for an older one.
    """

    config: RunConfig
    folder: Path
    ranks: Ranks
    store: CheckpointStore
    source: OpenedCheckpoint | None
    refused: list[CheckpointError]


@dataclass(frozen=True)
class RunParts:
    """The parts of a training run that compute: task, engine, datasets, plan and weights.

    Attributes:
        datasets: by split.
        weights: the initial weights.
        external: frozen weights that checkpoints do not store and that are read from their original files.
        ema: the moving average of the weights; None without one.
        filled: the feature cache to which training adds what it lacks; None if it adds nothing.
    """

    task: TaskModule
    engine: Engine
    datasets: Mapping[str, AnyDataset]
    plan: RunPlan
    weights: ResumedWeights | FileWeights
    external: ExternalWeights
    ema: EMA | None
    filled: RunCache | None = None


@dataclass
class Assembly:
    """A training run ready for its first step, as returned by `assemble`.

    Attributes:
        start: steps already taken.
    """

    folder: Path
    training: Training
    between: BetweenSteps
    reporter: RunReporter
    ledger: SkipLedger
    start: int


def assemble(
    config: RunConfig, resume: str = "auto", stop: StopFlag | None = None, allow: Sequence[str] = ()
) -> Assembly:
    """Assembles a training run up to its first step: checkpoint, parts, restored state, reporter, watchdog.

    Called by all ranks, in a process group.

    Args:
        config: the checked config.
        resume: as for `train`.
        stop: records signals; None if signals do not stop the run.
        allow: as for `train`.
    """
    store = make_store(config)
    with ExitStack() as undo:
        undo.callback(store.close, after_fault=True)  # so that the run's folder is unlocked for another call
        run = open_run(config, store, resume)
        parts = build_parts(run)
        manifest, restored = restore_parts(run, parts, allow)
        ready = equip(run, parts, manifest, restored, stop or StopFlag(), undo)
        undo.pop_all()
        return ready


def open_run(config: RunConfig, store: CheckpointStore, resume: str) -> OpenedRun:
    """Checks that all ranks of a training run have the same code, and opens the checkpoint to resume from."""
    check_plugins(config)
    check_commands(config)
    source, refused = store.open(resume)
    return OpenedRun(config, config.run.folder, Ranks.current(), store, source, refused)


def build_parts(run: OpenedRun) -> RunParts:
    """Builds task, engine, data and plan of a training run, with weights from files or drawn at random."""
    config, registry = run.config, run.config.registry
    task = task_of(config, run.source)
    engine: Engine = registry.build("engine", config.engine)
    check_data(config, task)  # before any data is measured
    datasets = {
        name: build_split(registry, section, config.run.seed, config.data.loader.mode, name)
        for name, section in config.data.splits.items()
    }
    check_class_names(task, datasets)
    datasets = in_buckets(config, task, datasets)
    datasets, cached, filled = in_cache(config, task, datasets)
    train = datasets["train"]
    samples = train if isinstance(train, BucketedSamples) else None
    plan = make_plan(config, run.ranks.count, task, engine, rows_of(train), samples)
    plan = replace(plan, notes=(*plan.notes, *cached))
    if missing := [file.path for file in plan.missing if file.needed == "to train"]:
        raise PlanError(
            f"files of frozen components are missing: {', '.join(missing)}",
            where="task",
            hint="download them, or set from_pretrained to the folder that contains them",
        )
    load_frozen_of(task, engine, plan.engine, config)
    weights = (
        ResumedWeights(run.source, config, task) if run.source is not None else FileWeights(config, task)
    )
    external = weights.left_out()
    check_in_files(task, external.names)
    engine.prepare(task, plan.engine, partial(make_optimizer, config), Randomness(config.run.seed), weights)
    ema = EMA(engine.shards, config.ema) if config.ema is not None else None
    return RunParts(task, engine, datasets, plan, weights, external, ema, filled)


def restore_parts(run: OpenedRun, parts: RunParts, allow: Sequence[str]) -> tuple[Document, Restored]:
    """Restores a training run's parts from its checkpoint, if any; writes and returns its manifest."""
    config, plan, weights, engine = run.config, parts.plan, parts.weights, parts.engine
    adapters = record_of(parts.task, config.train.adapters)
    external = parts.external.rows(config.literals)
    manifest = run_manifest(config, plan, parts.datasets, adapters, external)
    absent = weights.absent.names if isinstance(weights, ResumedWeights) else ()
    marks = resume_marks(config)
    restored = restore(
        run.store, run.source, run.refused, engine, parts.ema, manifest, marks, allow, plan.steps, absent
    )
    restored.notes += [*weights.notes(), *plan.notes, *promise_of(parts.datasets["train"])]
    run.ranks.on_first(
        "writing config.yaml and manifest.json", lambda: write_run_files(run.folder, config, plan, manifest)
    )
    if run.ranks.rank == 0 and (note := remember(config)) is not None:
        restored.notes.append(note)
    return manifest, restored


def equip(
    run: OpenedRun, parts: RunParts, manifest: Document, restored: Restored, stop: StopFlag, undo: ExitStack
) -> Assembly:
    """Adds the data loader, watchdog, reporter, evaluation, callbacks and saving to a training run.

    Args:
        run: the opened run.
        parts: its parts, with restored weights.
        manifest: the run's manifest, which every checkpoint stores.
        restored: what its checkpoint has restored.
        stop: records signals.
        undo: gets what closes the reporter if this function or its caller fails.
    """
    config, plan, task, engine = run.config, parts.plan, parts.task, parts.engine
    log, world = current_log(), plan.engine.world
    watchdog = Watchdog(run.folder, run.ranks.rank, world, config.run.stuck_after, log=log)
    reporter = make_reporter(run, parts, restored, watchdog)
    undo.callback(reporter.close, "failed")
    order, loader = make_loader(config, plan, parts.datasets["train"], task, engine, restored, reporter.note)
    ledger = SkipLedger(run.folder, config.data.loader.max_failed_share)
    guard = make_guard(config, parts, restored, reporter)
    read = iter(loader) if isinstance(loader, TrainingStream) else ledger.watch(loader)
    batches, filling = filled(read, parts.filled, task, plan.engine, engine.device, reporter.note)
    callbacks = CallbackList.of(config, filling)
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
        batches=batches,
        lr_schedule=make_lr_schedule(config, plan.steps, engine.base_lr),
        rng=Randomness(config.run.seed),
        guard=guard,
        reporter=reporter,
        between=between,
        clip_grad_norm=config.train.clip_grad_norm,
    )
    return Assembly(run.folder, with_late_steps(training), between, reporter, ledger, restored.step)


def make_reporter(run: OpenedRun, parts: RunParts, restored: Restored, watchdog: Watchdog) -> RunReporter:
    """The reporter of a training run, which has already shown the notes about its start.

    Args:
        run: the opened run.
        parts: its parts.
        restored: the first step, the samples seen before it, and the notes.
        watchdog: is notified of each phase that the reporter enters.
    """
    reporter = RunReporter(
        run.folder,
        run.config,
        parts.plan,
        restored.step,
        restored.facts.get("samples", 0.0),
        bins=parts.task.bins,
        watch=watchdog.enter,
    )
    reporter.window.counts = parts.engine.data_ranks.leads
    for sentence in restored.notes:
        reporter.note(sentence)
    return reporter


def make_guard(config: RunConfig, parts: RunParts, restored: Restored, reporter: RunReporter) -> UpdateGuard:
    """The guard that checks the gradients of each training step, with the state from the checkpoint.

    Args:
        config: the run's config.
        parts: the run's parts, in which a module with a non-finite output is searched.
        restored: facts of the checkpoint, with the guard's state.
        reporter: shows the guard's warnings.
    """
    roots = parts.task.trainable
    return UpdateGuard(
        config.train,
        restored.facts.get("guard"),
        locate=lambda forwards: first_non_finite(parts.task, roots, forwards, parts.engine),
        warn=reporter.note,
    )


def make_evaluating(
    run: OpenedRun, parts: RunParts, reporter: RunReporter, callbacks: CallbackList, stop: StopFlag
) -> Evaluating:
    """The evaluation of a training run on its held-out data: validators for `validation` and `test`.

    Args:
        run: the opened run.
        parts: its parts; a split without a dataset and without clips to sample has no validator.
        reporter: shows notes, metrics and clips.
        callbacks: receive the metrics.
        stop: ends an evaluation when a stop is requested.
    """
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


def make_store(config: RunConfig) -> CheckpointStore:
    """The checkpoint store of a training run, with the settings of its config's `checkpoint` section."""
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
    """The live tensors of a training run that a checkpoint stores, without model tensors in `left_out`."""
    state = engine.state_dict()
    state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in left_out}
    return {**state, **({"ema": ema.state_dict()} if ema is not None else {})}


def facts_of(
    parts: RunParts,
    restored: Restored,
    seed: int,
    order: Order | TrainingStream,
    reporter: RunReporter,
    guard: UpdateGuard,
) -> Document:
    """The facts of a training run that a checkpoint stores; the step gives the position in the data."""
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
    """Writes config.yaml (with all defaults) and manifest.json into the folder of a training run.

    Args:
        run_dir: the folder; it is made if it is missing.
        config: the run's config.
        plan: the run's plan, which manifest.json contains too.
        manifest: the run's manifest.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {**manifest, "plan": plan.to_mapping()}
    for name, text in (("config.yaml", to_yaml(config)), ("manifest.json", json.dumps(document, indent=2))):
        replace_text(run_dir / name, text + "\n" * (not text.endswith("\n")))
