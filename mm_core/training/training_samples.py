"""The training samples of a run: their lengths, their order and their loader."""

from __future__ import annotations

from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.contracts import Dataset, Engine, Randomness, SupportsLengths, Task, TaskModule, seeded
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import Order
from mm_core.errors import ContractError, PlanError, plural
from mm_core.plan import RunPlan, sample_order
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned


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
    config: RunConfig, plan: RunPlan, dataset: Dataset, task: TaskModule, engine: Engine, start: int
) -> tuple[Order, MicroBatchLoader]:
    """The order of the training samples, and the loader of this rank's micro-batches.

    Args:
        config: the run's config.
        plan: the run's plan: steps and global batch.
        dataset: the training samples.
        task: makes the transform of a batch.
        engine: prepared: its device, and the share of the data that this rank reads.
        start: first step, from 0.
    """
    section, shares = config.data.loader, engine.data_ranks
    if shares.count != plan.engine.data_parallel:
        raise ContractError(
            f"the engine's data_ranks have {plural(shares.count, 'share')}, but its plan has data_parallel"
            f" {plan.engine.data_parallel}",
            where=f"engine.type, {place_of_object(engine)}",
            hint="set `self.data_ranks = DataRanks(rank, plan.data_parallel)` in `prepare`",
        )
    order = sample_order(config, plan.global_batch_size, len(dataset), sample_lengths(config, dataset))
    return order, MicroBatchLoader(
        dataset,
        order,
        batch_transform=returned(Task.batch_transform, task.batch_transform(), task),
        rng=Randomness(config.run.seed),
        rank=shares.rank,
        data_parallel=shares.count,
        start_step=start,
        end_step=plan.steps,
        workers=section.workers,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        device_type=engine.device.type,
    )
