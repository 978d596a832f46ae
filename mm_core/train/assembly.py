"""Plan, data, engine and restored state of a run: everything before its first step."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_core.config.dump import to_yaml
from mm_core.config.schema import RunConfig, RunSection
from mm_core.contracts import Batch, Bins, Dataset, Engine, MeasuredDataset, Randomness, seeded
from mm_core.data.loader import MicroBatchLoader
from mm_core.data.sampler import BatchPlan
from mm_core.data.seeding import build_dataset
from mm_core.data.skipped import SkipLedger
from mm_core.device import set_patience, start_process_group, wait_for_ranks
from mm_core.errors import ContractError, PlanError
from mm_core.plan import RunPlan, build_task, check_data, make_plan, sample_order
from mm_core.plugin.registry import build, check_ranks_agree, get_registry
from mm_core.train.adapter_runs import adapters_in
from mm_core.train.agreement import Ranks
from mm_core.train.beginning import begin
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.class_names import check_class_names
from mm_core.train.ema import EMA
from mm_core.train.frozen import load_frozen_of
from mm_core.train.guard import UpdateGuard
from mm_core.train.initial_weights import FromFiles, Resumed
from mm_core.train.known_code import check_commands, remember
from mm_core.train.loop import Training
from mm_core.train.manifest import library_versions, run_manifest
from mm_core.train.milestones import RunMilestones, StopRequest, best_metric
from mm_core.train.non_finite import first_non_finite
from mm_core.train.observers import Observers
from mm_core.train.parameter_groups import groups_of
from mm_core.train.profiling import ProfileWindow
from mm_core.train.rank_logs import current_log
from mm_core.train.reporting import RunReporter
from mm_core.train.signals import leaving_at_signals
from mm_core.train.validation import Validator, build_metrics, default_settings
from mm_core.train.watchdog import Watchdog
from mm_core.weights.adapter_record import record_of


@dataclass(frozen=True)
class NeverStop:
    """A run that no signal stops: the default of `train` when it is called as a library."""

    requested: str | None = None


@dataclass
class Assembly:
    """A run ready to step: what `assemble` returns. start: steps already taken."""

    folder: Path
    training: Training
    milestones: RunMilestones
    reporter: RunReporter
    ledger: SkipLedger
    start: int


def assemble(
    config: RunConfig, resume: str = "auto", stop: StopRequest | None = None, allow: Sequence[str] = ()
) -> Assembly:
    """Plan, data, engine, restored state: everything before the first step, within a process group."""
    store = make_store(config, Path(config.run.dir) / config.run.name)
    with ExitStack() as undo:
        # The run's folder is free for the call that has mended the config.
        undo.callback(store.close, hurry=True)
        run = _assemble(config, store, resume, stop, allow, undo)
        undo.pop_all()
        return run


def _assemble(
    config: RunConfig,
    store: CheckpointStore,
    resume: str,
    stop: StopRequest | None,
    allow: Sequence[str],
    undo: ExitStack,
) -> Assembly:
    check_plugins(config)
    check_commands(config)
    rng = Randomness(config.run.seed)
    source, refused = store.open(resume)
    task = build_task(config, adapters_in(source))
    engine: Engine = build("engine", config.engine)
    check_data(config, task)  # before any is measured
    datasets: dict[str, Dataset] = {
        name: build_dataset(section, config.run.seed) for name, section in data_sections(config).items()
    }
    check_class_names(task, datasets)
    plan = make_plan(config, dist.get_world_size(), task, engine, len(datasets["train"]))
    if missing := [file.path for file in plan.missing if file.needed == "to train"]:
        raise PlanError(
            f"files of frozen components are missing: {', '.join(missing)}",
            where="task",
            hint="download them, or point from_pretrained at the folder that holds them",
        )
    run_dir = Path(config.run.dir) / config.run.name
    load_frozen_of(task, engine, plan.engine, config)
    weights: Resumed | FromFiles
    weights = Resumed(source, config, task) if source is not None else FromFiles(config, task)
    engine.prepare(task, plan.engine, partial(make_optimizer, config), rng, weights)
    ema = EMA(dict(engine.named_parameters()), config.ema) if config.ema is not None else None
    base, absent = weights.left_out(), weights.absent.names if isinstance(weights, Resumed) else ()
    adapters = record_of(task, config.train.adapters)
    manifest = run_manifest(config, plan, datasets, adapters, base.rows(config.literals))
    began = begin(store, source, refused, engine, ema, manifest, allow, plan.steps, absent)
    began.notes += [*weights.notes(), *plan.notes]
    Ranks.current().first(
        "writing config.yaml and manifest.json", lambda: write_run_files(run_dir, config, plan, manifest)
    )
    if dist.get_rank() == 0 and (note := remember(config)) is not None:
        began.notes.append(note)
    start, facts = began.step, began.facts
    watchdog = Watchdog(
        run_dir, dist.get_rank(), plan.engine.world, config.run.stuck_after, log=current_log()
    )
    bins: Bins | None = task.bins  # type: ignore[assignment]
    reporter = RunReporter(
        run_dir, config, plan, start, facts.get("samples", 0.0), bins=bins, watch=watchdog.enter
    )
    undo.callback(reporter.close, "failed")
    for sentence in began.notes:
        reporter.note(sentence)
    transform = task.batch_transform()  # type: ignore[operator]
    lengths = sample_lengths(config, datasets["train"])
    order = sample_order(config, plan.global_batch_size, len(datasets["train"]), lengths)
    loader = make_loader(config, plan, datasets["train"], order, transform, start, engine.device)
    ledger = SkipLedger(run_dir, config.data.loader.max_failed_share)
    roots: tuple[str, ...] = task.trainable  # type: ignore[assignment]
    guard = UpdateGuard(
        config.train,
        facts.get("guard"),
        locate=lambda rerun: first_non_finite(task, roots, rerun, engine.discard),
        warn=reporter.note,
    )
    request = stop or NeverStop()

    def validator(split: str) -> Validator | None:
        held_out = datasets.get(split)
        clips = split == "validation" and config.validation is not None and config.validation.samples
        if held_out is None and not clips:
            return None
        settings = default_settings(config, split)
        made = Validator(
            config,
            task,  # type: ignore[arg-type]
            engine,
            held_out,
            run_dir=run_dir,
            split=split,
            metrics=build_metrics(settings),
            ema=ema,
            stop=lambda: request.requested is not None,
            enter=reporter.enter,
            note=reporter.note,
            log=reporter.log,
            show=reporter.clips,
        )
        if clips:
            made.check_samples()
        return made

    milestones = RunMilestones(
        config=config,
        run_dir=run_dir,
        steps=plan.steps,
        store=store,
        state=partial(state_of, engine, ema, base.names),
        facts=partial(facts_of, config, plan, reporter, order, guard, ema, facts.get("imported")),
        config_yaml=to_yaml(config),
        manifest=manifest,
        request=request,
        reporter=reporter,
        observers=Observers([(c.type, build("callback", c)) for c in config.callbacks]),
        profile=ProfileWindow(config.profile, run_dir, dist.get_rank()),
        watchdog=watchdog,
        ema=ema,
        validator=validator("validation"),
        test=validator("test"),
        looked=bool(facts.get("looked", True)),
    )
    training = Training(
        plan=plan,
        task=task,  # type: ignore[arg-type]
        engine=engine,
        batches=ledger.watch(loader),
        lr_schedule=build("lr_schedule", config.lr_schedule, plan.steps, engine.base_lr),
        rng=rng,
        guard=guard,
        report=reporter,
        milestones=milestones,
        clip_grad_norm=config.train.clip_grad_norm,
    )
    return Assembly(run_dir, training, milestones, reporter, ledger, start)


def check_plugins(config: RunConfig) -> None:
    """PluginError, on every rank, when the ranks have other plugins, libraries, or versions of these."""
    registry = get_registry(config.plugins.path)
    libraries = library_versions(plugin.distribution or "" for plugin in registry.plugins)
    tables: list[Any] = [None] * dist.get_world_size()
    own = registry.fingerprint_table(), {"torch": str(torch.__version__), **libraries}
    dist.all_gather_object(tables, own)
    plugins, versions = zip(*tables, strict=True)
    check_ranks_agree(plugins)
    hint = "compare `pip list` on the machines of these ranks"
    check_ranks_agree(versions, "libraries", "not installed", hint)


def make_optimizer(config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over what the engine trains."""
    optimizer: torch.optim.Optimizer = build(
        "optimizer", config.optimizer, groups_of(parameters, config.train)
    )
    return optimizer


def sample_lengths(config: RunConfig, dataset: Dataset) -> Tensor | None:
    """What batches are grouped by; None where they are not. PlanError for a dataset that does not know."""
    if not config.data.loader.group_by_length:
        return None
    if not isinstance(dataset, MeasuredDataset):
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
def process_group(stuck_after: float | None = RunSection.stuck_after) -> Iterator[None]:
    """The default process group for the length of a run; one that the caller made is left alone.

    stuck_after: `run.stuck_after`, which the watchdog ends the run by.
    """
    set_patience(stuck_after)
    if dist.is_initialized():
        yield
        return
    with leaving_at_signals("waited for the other ranks to come"):
        start_process_group()
    try:
        yield
        with leaving_at_signals("waited for the other ranks to end", patience=5.0):
            wait_for_ranks()
    except BaseException:
        if dist.get_world_size() == 1:  # among several, the others may wait in a collective for ever
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def data_sections(config: RunConfig) -> dict[str, Any]:
    """The datasets that the config names, `train` first."""
    data = config.data
    named = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: section for name, section in named.items() if section is not None}


def make_store(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """The run's checkpoints, as its config wants them."""
    section = config.checkpoint
    modes: dict[Any, Any] = {True: "thread", False: None}
    return CheckpointStore(
        run_dir,
        section.keep,
        keep_every=section.keep_every,
        best=best_metric(config),
        mode=section.mode,
        asynchronous=modes.get(section.async_, section.async_),
    )


def state_of(engine: Engine, ema: EMA | None, left_out: Collection[str] = ()) -> dict[str, Any]:
    """The tensors of a checkpoint: live ones, not copies. left_out: of the model."""
    state = engine.state_dict()
    state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in left_out}
    return {**state, **({"ema": ema.state_dict()} if ema is not None else {})}


def facts_of(
    config: RunConfig,
    plan: RunPlan,
    reporter: RunReporter,
    order: BatchPlan,
    guard: UpdateGuard,
    ema: EMA | None,
    imported: Any = None,
) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors; where the data stood is a function of the step."""
    return {
        **({"imported": imported} if imported is not None else {}),
        "seed": config.run.seed,
        "samples": reporter.window.samples_seen,
        "order": order.facts(),
        "world": plan.engine.world,
        "guard": guard.state(),
        "ema_updates": ema.updates if ema is not None else 0,
    }


def write_run_files(run_dir: Path, config: RunConfig, plan: RunPlan, manifest: Mapping[str, Any]) -> None:
    """config.yaml (every default filled) and manifest.json."""
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {**manifest, "plan": plan.to_mapping()}
    for name, text in (("config.yaml", to_yaml(config)), ("manifest.json", json.dumps(document, indent=2))):
        staged = run_dir / f".{name}.tmp"
        staged.write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")
        staged.replace(run_dir / name)
