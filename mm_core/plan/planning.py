"""Builds a run's task without memory, and computes the plan of the run from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from mm_core.config.components import absent_inputs, option_faults, target_faults, walk_components
from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Engine,
    EnginePlan,
    Frozen,
    SampleRequest,
    StepFlops,
    Streamed,
    SupportsBatchSpecs,
    SupportsCheckMicroBatch,
    SupportsCheckTraining,
    SupportsNotes,
    SupportsSampleFlops,
    SupportsWeightsFrom,
    TaskModule,
    TrainingFacts,
)
from mm_core.data.loading.bucketed import BucketOrder
from mm_core.data.loading.sampler import Order
from mm_core.data.loading.seeding import build_split
from mm_core.device import untested_torch
from mm_core.errors import ConfigError, ContractError, PlanError, plural
from mm_core.modules.casting import cast_frozen
from mm_core.modules.patterns import freeze
from mm_core.modules.quantised import quantise_base
from mm_core.parallel.layout import like_blocks
from mm_core.plan.bucketing import (
    bucket_facts,
    check_buckets,
    check_group,
    check_sizes_set,
    in_buckets,
    mean_step,
)
from mm_core.plan.model_states import StageBytes, model_states
from mm_core.plan.padding import padding_notes
from mm_core.plan.run_plan import ComponentFact, MissingFile, ModuleFact, RunPlan
from mm_core.plan.samples import Samples
from mm_core.plan.settings import check_schedule, decode_notes, profile_notes
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.weights.adapters.inject import Structure, add_adapters
from mm_core.weights.fitting import formats_of
from mm_core.weights.stored import missing_at


def build_task(config: RunConfig, adapters: Structure | None = None) -> TaskModule:
    """Builds a run's task for planning: trainable modules on the meta device, frozen components not loaded.

    Args:
        config: the run's config.
        adapters: the adapters in a checkpoint of the run; if given, the files they started from are not read.
    """
    registry = config.registry
    for _, component in walk_components(config.task):
        # Import before entering the meta device: tensors of a Python module must be real.
        registry.resolve(component.kind, component.type).load_target()
    with torch.device("meta"):
        task: TaskModule = registry.build("task", config.task)
    assert isinstance(task, nn.Module)
    _check_names(task)
    train = config.train
    formats = formats_of(registry) if train.adapters else {}
    add_adapters(task, train.adapters, formats, train.also_train, adapters)
    freeze(task, train.freeze)
    if train.base_dtype is not None:
        cast_frozen(task, torch.bfloat16)
    if train.base_dtype not in (None, "bf16"):
        blocks = {root: like_blocks(task.get_submodule(root), root) or [root] for root in task.trainable}
        quantise_base(task, [path for paths in blocks.values() for path in paths], train.base_dtype)
    return task


def _check_names(task: TaskModule) -> None:
    """ContractError if `trainable` or `frozen` names something else than a module of the task."""
    modules = dict(task.named_modules())
    for attribute in ("trainable", "frozen"):
        if unknown := [name for name in getattr(task, attribute) if name not in modules]:
            raise ContractError(
                f"`{attribute}` names {', '.join(map(repr, unknown))}, which is not a module of the task",
                where=f"task, {place_of_object(task)}",
                accepted=", ".join(name for name, _ in task.named_children()),
            )


def build_frozen(task: TaskModule) -> None:
    """Builds a task's frozen components without memory, if their configs exist: plans need their sizes."""
    for name in task.frozen:
        component = getattr(task, name)
        if isinstance(component, Streamed):
            missing = [MissingFile(path, name, "to train") for path in component.missing_files()]
            if all(file.of_weights for file in missing):
                component.build_empty()


def check_data(config: RunConfig, task: TaskModule) -> None:
    """Checks, for the plan of a run, the task against the requested samples, the datasets and batch sizes.

    No dataset is opened; a component's own check may read the beginnings of files.

    Raises:
        ContractError: the options do not match.
        MMError: a component's own check finds a fault.
    """
    if faults := option_faults(config):
        raise faults[0] if len(faults) == 1 else ConfigError(faults)
    registry = config.registry
    asked = config.validation is not None and config.validation.samples is not None
    if asked and isinstance(task, TaskModule):
        TaskModule.check_request(task, SampleRequest(prompts=()))
    for split, data in config.data.splits.items():
        class_: object = registry.resolve("dataset", data.type).load_target()
        check_sizes_set(config, class_, data.options, split)
        variable = config.data.loader.mode == "variable"
        try:
            if variable:
                check_buckets(config, task, data.options)
            else:
                _check_batches(task, class_, data.options)
        except ContractError as fault:
            if split != "train" and not (fault.where or "").startswith("data"):
                fault.what = f"data.{split}: {fault.what}"
            raise
        if isinstance(class_, SupportsCheckMicroBatch) and not variable:
            class_.check_micro_batch(config.train.micro_batch_size, data.options)


def _check_batches(task: TaskModule, class_: object, options: Mapping[str, Any]) -> None:
    """Checks a task against the batches of a dataset's class, of every size that it has."""
    if not isinstance(class_, SupportsBatchSpecs):
        task.check(options)
        return
    faults: dict[str, ContractError] = {}
    specs = class_.batch_specs(options)
    for name, spec in specs.items():
        try:
            task.check(spec)
        except ContractError as fault:
            faults[name] = fault
    for name, found in faults.items():
        if len(faults) < len(specs):  # else what is wrong is not that the data has them
            found.what = f"the data has {name}, which this task does not take: {found.what}"
        raise found


def make_plan(
    config: RunConfig,
    world: int,
    task: TaskModule | None = None,
    engine: Engine | None = None,
    train: Samples | None = None,
    purpose: Literal["train", "import"] = "train",
) -> RunPlan:
    """Computes the plan of a run for `world` ranks.

    Args:
        config: the run's config.
        world: number of ranks.
        task: the task; None: built here.
        engine: the engine; None: built here.
        train: the samples of data.train; None: opened here, if the plan depends on them.
        purpose: as `Engine.plan` takes it.

    Raises:
        ConfigError: a target does not keep the contract of its kind, or the schedule does not fit the run.
        ContractError: the components do not match each other.
        PlanError: the run does not fit the number of ranks.
    """
    registry = config.registry
    if faults := target_faults(config, import_targets=True):
        raise faults[0] if len(faults) == 1 else ConfigError(faults)
    task = build_task(config) if task is None else task
    engine = registry.build("engine", config.engine) if engine is None else engine
    assert engine is not None
    check_data(config, task)
    build_frozen(task)
    states = state_tensors(config)
    layout = engine.plan(task, world, states, purpose=purpose)
    _check_base_dtype(config, task, layout)
    size, accumulation = _batch(config, layout.data_parallel)
    order = _order(config, task, size, accumulation, train)
    buckets = cast(BucketOrder | None, order if config.data.loader.mode == "variable" else None)
    steps = _steps(config, order)
    check_schedule(config, steps)
    notes = (*untested_torch(), *_notes(task), *padding_notes(config, task), *profile_notes(config, steps))
    notes = (*notes, *decode_notes(config))
    modules = _modules(task)
    return RunPlan(
        name=config.run.name,
        engine=layout,
        components=tuple(_components(config)),
        modules=tuple(modules),
        model_states=_model_states(config, modules, states, world),
        missing=missing_files(config, task),
        steps=steps,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=size,
        accumulation=accumulation,
        buckets=() if buckets is None else bucket_facts(buckets),
        notes=(*notes, *_engine_notes(config, engine, steps, accumulation, layout)),
        flops=_step_flops(config, task, layout, size, buckets),
        ema_bytes=layout.gradient_bytes if config.ema is not None else 0,
        ema_on_host=config.ema is not None and (config.ema.device == "cpu" or bool(layout.offloaded_bytes)),
    )


def state_tensors(config: RunConfig) -> float:
    """Tensors of optimizer state per parameter, in parameter sizes."""
    optimizer = config.registry.resolve("optimizer", config.optimizer.type)
    states = optimizer.component.capabilities.get("state_tensors", 2)
    assert isinstance(states, (int, float))
    return states


def _batch(config: RunConfig, shares: int) -> tuple[int, int]:
    """Samples of a step over all ranks, and its micro-batches; PlanError if they do not divide."""
    micro = config.train.micro_batch_size
    wave = micro * shares
    size = config.train.global_batch_size or wave
    if size % wave:
        near = sorted({max(wave, size // wave * wave), (size // wave + 1) * wave})
        raise PlanError(
            f"global_batch_size {size} does not divide into micro-batches of {micro}"
            f" on {plural(shares, 'data-parallel rank')}",
            where="train.global_batch_size",
            accepted=f"a multiple of {wave}: {', '.join(map(str, near))}, ...",
        )
    return size, size // wave


def _order(
    config: RunConfig, task: TaskModule, size: int, accumulation: int, train: Samples | None
) -> Order | None:
    """The order of the training samples; None if the plan does not depend on it, or the data are missing."""
    data = config.data
    if data.loader.mode == "variable":
        check_group(accumulation, data.loader.buckets_per_step)
    elif config.train.steps is not None:
        return None
    if train is None:
        if "train" in absent_inputs(config):
            return None
        opened = build_split(config.registry, data.train, config.run.seed, data.loader.mode, "train")
        train = in_buckets(config, task, {"train": opened})["train"]
    if train.stream is not None:
        raise PlanError(
            "an IterableDataset or DataLoader has no known number of samples, so its epochs have no known"
            " number of steps",
            where="train.epochs",
            hint="set train.steps instead",
        )
    return train.order(config, size)


def _model_states(
    config: RunConfig, modules: Sequence[ModuleFact], states: float, world: int
) -> tuple[StageBytes, ...]:
    if config.train.adapters:
        return ()  # `base_choices` has the figures of a base in the form in which it is kept
    trained = sum(m.trained for m in modules if m.trainable)
    whole = sum(m.parameters for m in modules if m.trainable)
    return model_states(trained, whole - trained, states, world)


def _notes(task: TaskModule) -> tuple[str, ...]:
    if not isinstance(task, SupportsNotes):
        return ()
    return tuple(returned(SupportsNotes.notes, task.notes(), task))


def _engine_notes(
    config: RunConfig, engine: Engine, steps: int, accumulation: int, layout: EnginePlan
) -> tuple[str, ...]:
    if not isinstance(engine, SupportsCheckTraining):
        return ()
    train = config.train
    facts = TrainingFacts(
        steps=steps,
        micro_batch_size=train.micro_batch_size,
        accumulation=accumulation,
        shares=layout.data_parallel,
        clip_grad_norm=train.clip_grad_norm,
        optimizer=config.optimizer,
        lr_schedule=config.lr_schedule,
    )
    found = engine.check_training(facts)
    return tuple(returned(SupportsCheckTraining.check_training, found, engine))


def _step_flops(
    config: RunConfig, task: TaskModule, layout: EnginePlan, global_batch_size: int, order: BucketOrder | None
) -> StepFlops | None:
    """FLOPs of a step over all ranks, with buckets of the mean step of an epoch."""
    if not isinstance(task, SupportsSampleFlops):
        return None
    if order is None and config.data.loader.mode == "variable":
        return None  # the data are missing
    options = config.data.train.options
    parts = [(options, float(global_batch_size))] if order is None else mean_step(order, options)
    found: list[StepFlops] = []
    for spec, samples in parts:
        given = task.sample_flops(spec, layout.recomputed)
        sample = returned(SupportsSampleFlops.sample_flops, given, task)
        if sample is None:
            return None
        found.append(sample * samples)
    return StepFlops(*(sum(column) for column in zip(*map(astuple, found), strict=True)))


def _check_base_dtype(config: RunConfig, task: TaskModule, layout: EnginePlan) -> None:
    """Raises PlanError if one computation would use weights of two dtypes."""
    if (name := config.train.base_dtype) is None:
        return
    if layout.compute_dtype is None:
        raise PlanError(
            f"adapters are fp32 but the weights under them would be {name}, and no dtype is set for the"
            " computation",
            where="train.base_dtype",
            hint="set engine.param_dtype: bf16, or what your engine calls that",
        )
    for path in layout.ignored:
        if path.split(".")[0] not in task.trainable:
            continue  # an encoder, in a dtype of its own
        if any(p.dtype != torch.float32 for p in task.get_submodule(path).parameters()):
            raise PlanError(
                f"{path} would be stored in {name}, but the engine ignores this module and would not convert"
                " its inputs",
                where="train.base_dtype",
                hint=f"remove {path} from engine.ignored_modules, or remove train.base_dtype",
            )


def _steps(config: RunConfig, order: Order | None) -> int:
    """The total number of steps; epochs are rounded up to complete steps. 0: the data are missing."""
    if config.train.steps is not None:
        return config.train.steps
    if order is None:
        return 0
    assert config.train.epochs is not None
    return math.ceil(config.train.epochs * order.batches_per_epoch)


def missing_files(config: RunConfig, task: TaskModule) -> tuple[MissingFile, ...]:
    """Missing files: of trained and frozen components, of others (a scheduler) for sampling, and of data."""
    trained = task.trainable
    frozen = task.frozen
    found = []
    for name in trained:
        component = task.get_submodule(name)
        given = component.weights_from if isinstance(component, SupportsWeightsFrom) else None
        paths = missing_at(Path(given.path)) if given is not None else []
        found += [MissingFile(path, name, "to begin") for path in paths]
    others = [name for name in config.task.options if name not in (*trained, *frozen)]
    samples = config.validation is not None and config.validation.samples is not None
    for name in (*frozen, *others):
        part = getattr(task, name, None)  # an option of a task need not be an attribute
        if isinstance(part, Frozen):
            now = name in frozen or samples
            paths = returned(Frozen.missing_files, part.missing_files(), part)
            found += [MissingFile(path, name, "to train" if now else "to sample") for path in paths]
    for split, paths in absent_inputs(config).items():
        found += [MissingFile(path, f"data.{split}", "to train") for path in paths]
    return tuple(found)


def _modules(task: TaskModule) -> list[ModuleFact]:
    facts = []
    for trainable, names in ((True, task.trainable), (False, task.frozen)):
        for name in names:
            module = getattr(task, name)
            own = list(module.parameters()) if isinstance(module, nn.Module) else []
            trained = sum(p.numel() for p in own if trainable and p.requires_grad)
            facts.append(ModuleFact(name, trainable, sum(p.numel() for p in own), trained))
    return facts


def _components(config: RunConfig) -> list[ComponentFact]:
    found = [
        (key, each.type, config.registry.resolve(each.kind, each.type))
        for key, each in walk_components(config)
    ]
    return [ComponentFact(key, type_, r.distribution or "", r.version or "") for key, type_, r in found]
