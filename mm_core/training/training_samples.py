"""The training samples of a run: their lengths, their order and their loader."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Dataset, Engine, Randomness, SupportsLengths, Task, TaskModule, seeded
from mm_core.data.loading.bucketed import BucketedSamples
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.plain import AnyDataset, PlainBatches
from mm_core.data.loading.sampler import Order
from mm_core.data.loading.streams import BatchStream, TrainingStream
from mm_core.errors import ContractError, PlanError, plural
from mm_core.plan import RunPlan, bucket_order, sample_order
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.training.parts import Restored


def sample_lengths(config: RunConfig, dataset: Dataset) -> Tensor | None:
    """Lengths of the training samples, for batches grouped by length; None if batches are not grouped."""
    if not config.data.loader.group_by_length:
        return None
    if not isinstance(dataset, SupportsLengths):
        raise PlanError(
            f"the dataset {type(dataset).__name__} does not provide the lengths of its samples",
            where="data.loader.group_by_length",
            accepted="datasets with a method lengths(), such as text_rows",
            hint="remove group_by_length: it has no benefit if all samples have the same size",
        )
    with seeded(Randomness(config.run.seed).at("lengths")):  # all ranks must sort by the same lengths
        lengths = returned(SupportsLengths.lengths, dataset.lengths(), dataset)
    if lengths.shape != (len(dataset),):
        raise ContractError(
            f"{type(dataset).__name__}.lengths() returns the shape {list(lengths.shape)} for"
            f" {plural(len(dataset), 'sample')}",
            where="data.train",
            accepted="one length per sample",
        )
    return lengths


def make_loader(
    config: RunConfig,
    plan: RunPlan,
    dataset: AnyDataset,
    task: TaskModule,
    engine: Engine,
    restored: Restored,
    note: Callable[[str], None],
) -> tuple[Order, MicroBatchLoader] | tuple[TrainingStream, TrainingStream]:
    """The order of the training samples, and the loader of this rank's micro-batches.

    Args:
        config: the run's config.
        plan: the run's plan: steps and global batch.
        dataset: the training samples.
        task: makes the transform of a batch.
        engine: prepared: its device, and the share of the data that this rank reads.
        restored: the first step, and the facts of its checkpoint.
        note: receives messages for the user.
    """
    section, shares = config.data.loader, engine.data_ranks
    if shares.count != plan.engine.data_parallel:
        raise ContractError(
            f"the engine's data_ranks have {plural(shares.count, 'share')}, but its plan has data_parallel"
            f" {plan.engine.data_parallel}",
            where=f"engine.type, {place_of_object(engine)}",
            hint="set `self.data_ranks = DataRanks(rank, plan.data_parallel)` in `prepare`",
        )
    transform = returned(Task.batch_transform, task.batch_transform(), task)
    if isinstance(dataset, PlainBatches):
        return _streamed(config, plan, dataset, transform, engine, restored, note)
    order: Order
    if isinstance(dataset, BucketedSamples):
        order = bucket_order(config, plan.global_batch_size, dataset)
    else:
        order = sample_order(config, plan.global_batch_size, len(dataset), sample_lengths(config, dataset))
    return order, MicroBatchLoader(
        dataset,
        order,
        batch_transform=transform,
        rng=Randomness(config.run.seed),
        share=shares,
        steps=range(restored.step, plan.steps),
        workers=section.workers,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        device_type=engine.device.type,
        decode_seconds=config.data.decode_seconds,
    )


def _streamed(
    config: RunConfig,
    plan: RunPlan,
    source: PlainBatches,
    transform: Callable[[Batch], Batch] | None,
    engine: Engine,
    restored: Restored,
    note: Callable[[str], None],
) -> tuple[TrainingStream, TrainingStream]:
    section = config.data.loader
    stream = BatchStream(
        source,
        transform=transform,
        rng=Randomness(config.run.seed),
        share=engine.data_ranks,
        rows=plan.micro_batch_size,
        whole=True,
        workers=section.workers,
        pin_memory=section.pin_memory and engine.device.type != "cpu",
        note=note,
    )
    steps, position = range(restored.step, plan.steps), restored.facts.get("order", {})
    streamed = TrainingStream(stream, plan.accumulation, steps, position, config.train.overfit_one_batch)
    return streamed, streamed
