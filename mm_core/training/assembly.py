"""Assembling a run before its first step: plan, data, engine and restored state."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.run_manifest import check_commits, check_plugins, fingerprints, run_manifest
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.dump import to_yaml
from mm_core.config.sections import RunConfig
from mm_core.config.stored import check_commands, remember
from mm_core.contracts import Callback, Engine, Randomness
from mm_core.data.loading.cut_captions import CutCaptions
from mm_core.data.loading.plain import promise_of
from mm_core.data.loading.sampler import Order
from mm_core.data.loading.skipped import SkipLedger
from mm_core.data.loading.streams import TrainingStream
from mm_core.errors import PlanError
from mm_core.evaluation.validator import Validator, build_metrics, default_settings
from mm_core.files import replace_text
from mm_core.loading.frozen import load_frozen_of
from mm_core.loading.initial_weights import FileWeights, ResumedWeights
from mm_core.loading.left_out import WeightSources
from mm_core.modules.quantised import check_in_files
from mm_core.optim.configured import make_lr_schedule, make_optimizer
from mm_core.optim.ema import EMA
from mm_core.plan import RunPlan, build_task, in_cache, make_plan, open_datasets
from mm_core.runtime.launch.rank_logs import current_log
from mm_core.runtime.launch.signals import StopFlag
from mm_core.runtime.launch.watchdog import Watchdog
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.profiler import ProfileWindow
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.between_steps import BetweenSteps
from mm_core.training.callback_list import CallbackList
from mm_core.training.evaluating import Evaluating, best_metric
from mm_core.training.forecast.in_run import NOTHING, Foreseen, PeakCheck, checked
from mm_core.training.guard import UpdateGuard
from mm_core.training.late import late_steps
from mm_core.training.loop import Training
from mm_core.training.non_finite import first_non_finite
from mm_core.training.optional.caching import FilledBatches
from mm_core.training.optional.exporting import ExportAtSaves
from mm_core.training.optional.memory import advise
from mm_core.training.parts import Restored, RunParts, restore
from mm_core.training.training_samples import make_loader
from mm_core.weights.adapters.record import record_of


def assemble(
    config: RunConfig,
    resume: str = "auto",
    stop: StopFlag | None = None,
    allow: Sequence[str] = (),
    foreseen: Foreseen = NOTHING,
) -> Training:
    """Assembles a training run up to its first step: checkpoint, parts, restored state, reporter, watchdog.

    Called by all ranks, in a process group.

    Args:
        config: the checked config.
        resume: as for `train`.
        stop: records signals; None if signals do not stop the run.
        allow: as for `train`.
        foreseen: what rank 0 knows of the run before it starts.
    """
    ranks, store = Ranks.current(), make_store(config)
    with ExitStack() as undo:
        undo.callback(store.close, after_fault=True)  # so that the run's folder is unlocked for another call
        undo.push(lambda _, error, __: advise(error, config.engine, foreseen) if error is not None else None)
        foreseen = checked(foreseen, ranks)
        parts = build_parts(config, ranks, store, resume)
        manifest, restored = restore_parts(parts, allow, foreseen)
        ready = equip(parts, manifest, restored, stop or StopFlag(), undo)
        ready.foreseen = foreseen
        if foreseen.forecast is not None:
            ready.reporter.ran = PeakCheck(foreseen.forecast, ready.reporter.note)
        undo.pop_all()
        return ready


def build_parts(config: RunConfig, ranks: Ranks, store: CheckpointStore, resume: str) -> RunParts:
    """Opens the checkpoint to resume from, and builds task, engine, data and plan of a training run, with
    weights from files or drawn at random. All ranks must have the same code."""
    check_plugins(config.registry, ranks)
    check_commits(config, ranks)
    check_commands(config)
    source, refused = store.open(resume)
    task = build_task(config, source.adapters if source is not None else {})
    engine: Engine = config.registry.build("engine", config.engine)
    datasets, cached, filled = in_cache(config, task, open_datasets(config, task))
    plan = make_plan(config, ranks.count, task, engine, datasets["train"])
    plan = replace(plan, notes=(*plan.notes, *cached))
    if missing := [file for file in plan.missing if file.needed == "to train"]:
        of_data = missing[0].of_data  # those of components come first
        raise PlanError(
            f"files of {'the data' if of_data else 'frozen components'} are missing:"
            f" {', '.join(file.path for file in missing)}",
            where=missing[0].component if of_data else "task",
            hint="copy them there, or correct the paths"
            if of_data
            else "download them, or set from_pretrained to the folder that contains them",
        )
    load_frozen_of(task, engine, plan.engine, config.registry)
    sources = WeightSources(task, config.init_from, config.registry, config.allow_code)
    frozen = config.checkpoint.frozen
    weights: ResumedWeights | FileWeights
    if source is not None:
        weights = ResumedWeights(source, sources, frozen)
    else:
        weights = FileWeights(sources, config.train.adapters, frozen)
    external = weights.left_out()
    check_in_files(task, external.names)
    optimizer = partial(make_optimizer, config.registry, config.optimizer, config.train)
    engine.prepare(task, plan.engine, optimizer, Randomness(config.run.seed), weights)
    ema = EMA(engine.shards, config.ema) if config.ema is not None else None
    return RunParts(
        config, ranks, store, source, refused, task, engine, datasets, plan, weights, external, ema, filled
    )


def restore_parts(parts: RunParts, allow: Sequence[str], foreseen: Foreseen) -> tuple[Document, Restored]:
    """Restores a training run's parts from its checkpoint, if any; writes and returns its manifest."""
    config, ranks, plan = parts.config, parts.ranks, parts.plan
    adapters = record_of(parts.task, config.train.adapters)
    external = parts.external.rows(config.literals)
    datasets = {split: samples.dataset for split, samples in parts.datasets.items()}
    data = fingerprints(config.data.splits, datasets, ranks)
    manifest = run_manifest(config, plan, data, adapters, external)
    restored = restore(parts, manifest, allow)
    restored.notes += [*foreseen.notes, *parts.weights.notes(), *plan.notes, *promise_of(datasets["train"])]
    forecast = {"forecast": foreseen.forecast.to_mapping()} if foreseen.forecast is not None else {}
    files = partial(write_run_files, config, plan, {**manifest, **forecast})
    ranks.on_first("writing config.yaml and manifest.json", files)
    if ranks.rank == 0 and (note := remember(config)) is not None:
        restored.notes.append(note)
    return manifest, restored


def equip(
    parts: RunParts, manifest: Document, restored: Restored, stop: StopFlag, undo: ExitStack
) -> Training:
    """Adds the data loader, watchdog, reporter, evaluation, callbacks and saving to a training run.

    Args:
        parts: the run's parts, with restored weights.
        manifest: the run's manifest, which every checkpoint stores.
        restored: what its checkpoint has restored.
        stop: records signals.
        undo: gets what closes the reporter if this function or its caller fails.
    """
    config, plan, task, engine = parts.config, parts.plan, parts.task, parts.engine
    folder, ranks, log = config.run.folder, parts.ranks, current_log()
    watchdog = Watchdog(folder, ranks.rank, plan.engine.world, config.run.stuck_after, log=log)
    reporter = make_reporter(parts, restored, watchdog)
    undo.callback(reporter.close, "failed")
    order, loader = make_loader(config, plan, parts.datasets["train"], task, engine, restored, reporter.note)
    ledger = SkipLedger(folder, config.data.loader.max_failed_share)
    guard = make_guard(parts, restored, reporter)
    read = iter(loader) if isinstance(loader, TrainingStream) else ledger.watch(loader)
    cut, named = CutCaptions(), make_callbacks(config, reporter, stop)
    read = cut.watch(read, reporter.note)
    if parts.filled is not None:
        read = filled = FilledBatches(read, task, parts.filled, plan.engine, engine.device, reporter.note)
        named.append(("the feature cache", filled))
    callbacks = CallbackList(named)
    between = BetweenSteps(
        config=config,
        steps=plan.steps,
        store=parts.store,
        state=partial(state_of, engine, parts.ema, parts.external.names),
        facts=partial(facts_of, parts, restored, order, reporter, guard),
        manifest=manifest,
        config_yaml=to_yaml(config),
        evaluating=make_evaluating(parts, reporter, callbacks, stop),
        flag=stop,
        reporter=reporter,
        callbacks=callbacks,
        profile=ProfileWindow(config.profile, folder, ranks.rank),
        watchdog=watchdog,
        ema=parts.ema,
        evaluated=bool(restored.facts.get("evaluated", True)),
    )
    training = Training(
        plan=plan,
        task=task,
        engine=engine,
        batches=read,
        lr_schedule=make_lr_schedule(config.registry, config.lr_schedule, plan.steps, engine.base_lr),
        rng=Randomness(config.run.seed),
        guard=guard,
        reporter=reporter,
        between=between,
        clip_grad_norm=config.train.clip_grad_norm,
        start=restored.step,
        cut=cut,
    )
    training.late = late_steps(training)
    return training


def make_callbacks(config: RunConfig, reporter: RunReporter, stop: StopFlag) -> list[tuple[str, Callback]]:
    """The callbacks of a config with their names, and that of `checkpoint.export`."""
    named = [(each.type, config.registry.build("callback", each)) for each in config.callbacks]
    if config.checkpoint.export is not None:
        export = ExportAtSaves(config.checkpoint.export, config.ema is not None, stop, reporter.note)
        named.append(("checkpoint.export", export))
    return named


def make_reporter(parts: RunParts, restored: Restored, watchdog: Watchdog) -> RunReporter:
    """The reporter of a training run, which has already shown the notes about its start.

    Args:
        parts: the run's parts.
        restored: the first step, the samples seen before it, and the notes.
        watchdog: is notified of each phase that the reporter enters.
    """
    seen = restored.facts.get("samples", 0.0)
    config, plan, bins, watch = parts.config, parts.plan, parts.task.bins, watchdog.enter
    folder, start = config.run.folder, restored.step
    reporter = RunReporter(
        folder, config.log, config.registry, parts.ranks, plan, start, seen, bins=bins, watch=watch
    )
    reporter.window.counts = parts.engine.data_ranks.leads
    for sentence in restored.notes:
        reporter.note(sentence)
    return reporter


def make_guard(parts: RunParts, restored: Restored, reporter: RunReporter) -> UpdateGuard:
    """The guard that checks the gradients of each training step, with the state from the checkpoint.

    Args:
        parts: the run's parts, in which a module with a non-finite output is searched.
        restored: facts of the checkpoint, with the guard's state.
        reporter: shows the guard's warnings.
    """
    task = parts.task
    return UpdateGuard(
        parts.config.train,
        restored.facts.get("guard"),
        locate=lambda forwards: first_non_finite(task, task.trainable, forwards, parts.engine),
        warn=reporter.note,
    )


def make_evaluating(
    parts: RunParts, reporter: RunReporter, callbacks: CallbackList, stop: StopFlag
) -> Evaluating:
    """The evaluation of a training run on its held-out data: validators for `validation` and `test`.

    Args:
        parts: the run's parts; a split without a dataset and without clips to sample has no validator.
        reporter: shows notes, metrics and clips.
        callbacks: receive the metrics.
        stop: ends an evaluation when a stop is requested.
    """
    config = parts.config
    samples = config.validation is not None and config.validation.samples is not None

    def validator(split: str) -> Validator | None:
        held_out, clips = parts.datasets.get(split), samples and split == "validation"
        if held_out is None and not clips:
            return None
        made = Validator(
            config,
            parts.ranks,
            parts.task,
            parts.engine,
            held_out,
            run_dir=config.run.folder,
            split=split,
            metrics=build_metrics(config.registry, default_settings(config.validation, split)),
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

    best, averaged = config.checkpoint.best, config.ema is not None
    held_out, test = validator("validation"), validator("test")
    return Evaluating(config.validation, best, averaged, reporter, callbacks, held_out, test)


def make_store(config: RunConfig) -> CheckpointStore:
    """The checkpoint store of a training run, with the settings of its config's `checkpoint` section."""
    section = config.checkpoint
    return CheckpointStore(
        config.run.folder,
        section.keep,
        keep_every=section.keep_every,
        best=best_metric(section.best, config.ema is not None),
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
    order: Order | TrainingStream,
    reporter: RunReporter,
    guard: UpdateGuard,
) -> Document:
    """The facts of a training run that a checkpoint stores; the step gives the position in the data."""
    return {
        **({"imported": imported} if (imported := restored.facts.get("imported")) is not None else {}),
        "seed": parts.config.run.seed,
        "samples": reporter.window.samples_seen,
        "order": order.facts(),
        "world": parts.plan.engine.world,
        "guard": guard.state(),
        "ema_updates": parts.ema.updates if parts.ema is not None else 0,
    }


def write_run_files(config: RunConfig, plan: RunPlan, manifest: Document) -> None:
    """Writes config.yaml (with all defaults) and manifest.json into the folder of a training run.

    Args:
        config: the run's config.
        plan: the run's plan, which manifest.json contains too.
        manifest: the run's manifest, with the forecast.
    """
    run_dir = config.run.folder
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {**manifest, "plan": plan.to_mapping()}
    for name, text in (("config.yaml", to_yaml(config)), ("manifest.json", json.dumps(document, indent=2))):
        replace_text(run_dir / name, text + "\n" * (not text.endswith("\n")))
