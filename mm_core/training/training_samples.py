"""The training samples of a run: their lengths, their order and their loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mm_core.config.sections import LoaderSection, RunConfig
from mm_core.contracts import (
    Batch,
    DataRanks,
    Dataset,
    Engine,
    Randomness,
    SupportsLengths,
    SupportsWork,
    Task,
    TaskModule,
    seeded,
)
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan, Order, Work
from mm_core.data.loading.streams import BatchStream, TrainingStream
from mm_core.errors import ContractError, PlanError, plural
from mm_core.plan import RunPlan
from mm_core.plan.samples import Samples
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.training.parts import Restored


def sample_lengths(loader: LoaderSection, seed: int, dataset: Dataset) -> Tensor | None:
    """Lengths of the training samples, for batches grouped by length; None if batches are not grouped."""
    if not loader.group_by_length:
        return None
    if not isinstance(dataset, SupportsLengths):
        raise PlanError(
            f"the dataset {type(dataset).__name__} does not provide the lengths of its samples",
            where="data.loader.group_by_length",
            accepted="datasets with a method lengths(), such as text_rows",
            hint="remove group_by_length: it has no benefit if all samples have the same size",
        )
    with seeded(Randomness(seed).at("lengths")):  # all ranks must sort by the same lengths
        lengths = returned(SupportsLengths.lengths, dataset.lengths(), dataset)
    if lengths.shape != (len(dataset),):
        raise ContractError(
            f"{type(dataset).__name__}.lengths() returns the shape {list(lengths.shape)} for"
            f" {plural(len(dataset), 'sample')}",
            where="data.train",
            accepted="one length per sample",
        )
    return lengths


def sample_work(seed: int, dataset: Dataset) -> Work:
    """What returns the work of a training sample, now measured, for ranks with even shares."""
    if not isinstance(dataset, SupportsWork):
        raise PlanError(
            f"the dataset {type(dataset).__name__} does not provide the work of its samples",
            where="data.loader.balance",
            accepted="datasets with a method work_at(), such as conversations",
            hint="remove balance: all ranks have as much work if all samples have the same size",
        )
    returned(SupportsWork.work_at, dataset.work_at(0, Randomness(seed).at("data", 0, 0)), dataset)
    return dataset.work_at


def make_loader(
    config: RunConfig,
    plan: RunPlan,
    samples: Samples,
    task: TaskModule,
    engine: Engine,
    restored: Restored,
    note: Callable[[str], None],
) -> tuple[Order, MicroBatchLoader] | tuple[TrainingStream, TrainingStream]:
    """The order of the training samples, and the loader of this rank's micro-batches.

    Args:
        config: the run's config.
        plan: the run's plan: steps and global batch.
        samples: those of data.train.
        task: makes the transform of a batch.
        engine: prepared: its device, and the share of the data that this rank reads.
        restored: the first step, and the facts of its checkpoint.
        note: receives messages for the user.
    """
    section, shares, rng = config.data.loader, engine.data_ranks, Randomness(config.run.seed)
    steps = range(restored.step, plan.steps)
    _check_shares(engine, plan)
    transform = returned(Task.batch_transform, task.batch_transform(), task)
    if samples.stream is not None:
        stream = BatchStream(
            samples.stream,
            transform=transform,
            rng=rng,
            share=shares,
            rows=plan.micro_batch_size,
            whole=True,
            workers=section.workers,
            pin_memory=section.pin_memory and engine.device.type != "cpu",
            ranks=plan.engine.world,
            note=note,
        )
        position, repeat_first = restored.facts.get("order", {}), config.train.overfit_one_batch
        streamed = TrainingStream(stream, plan.accumulation, steps, position, repeat_first)
        return streamed, streamed
    lengths = sample_lengths(section, config.run.seed, samples.dataset)
    order = samples.order(config, plan.global_batch_size, lengths)
    if section.balance and isinstance(order, BatchPlan):
        order = replace(order, work=sample_work(config.run.seed, samples.dataset))
    return order, MicroBatchLoader(
        samples.dataset,
        order,
        batch_transform=transform,
        rng=rng,
        share=shares,
        steps=steps,
        workers=section.workers,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        device_type=engine.device.type,
        decode_seconds=config.data.decode_seconds,
    )


def first_batch(config: RunConfig, plan: RunPlan, samples: Samples, task: TaskModule) -> Batch:
    """The first micro-batch of rank 0, read in this process and on the CPU."""
    loader = replace(config.data.loader, workers=0)
    config = replace(config, data=replace(config.data, loader=loader))
    engine: Engine = config.registry.build("engine", config.engine)
    engine.data_ranks = DataRanks(0, plan.engine.data_parallel)
    engine.device = torch.device("cpu")
    _, batches = make_loader(config, plan, samples, task, engine, Restored(), lambda _: None)
    found: Batch = next(iter(batches))
    return found


def _check_shares(engine: Engine, plan: RunPlan) -> None:
    if (count := engine.data_ranks.count) != plan.engine.data_parallel:
        raise ContractError(
            f"the engine's data_ranks have {plural(count, 'share')}, but its plan has data_parallel"
            f" {plan.engine.data_parallel}",
            where=f"engine.type, {place_of_object(engine)}",
            hint="set `self.data_ranks = DataRanks(rank, plan.data_parallel)` in `prepare`",
        )
