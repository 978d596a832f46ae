"""What an evaluation reads: every row exactly once over all ranks, in batches that all ranks share alike."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from mm_core.config.sections import LoaderSection
from mm_core.contracts import Batch, Dataset, Randomness, SampleKey
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan, SlotSpec
from mm_core.data.loading.skipped import UnreadableError
from mm_core.errors import DataError


@dataclass(frozen=True)
class EvenRows(BatchPlan):
    """`num_samples` rows, evenly spaced over a dataset of `total`, in order; any epoch reads them again."""

    total: int = 0

    def global_batch(self, step: int) -> list[SlotSpec]:
        """The rows of step `step`, under the dataset's own indices; those of weight 0 only fill up."""
        return [
            SlotSpec(SampleKey(0, key.index * self.total // self.num_samples), weight)
            for key, weight in super().global_batch(step)
        ]


class EvaluationData:
    """The batches of one rank. Micro-batch m of the evaluation holds the same rows at any world size, and
    belongs to rank m % world; every rank has equally many.

    A row that cannot be read gets weight 0; `MicroBatchLoader` puts another one in its place, so that the
    shapes stay as they are, and lists it in `Batch.failures`.

    Args:
        dataset: what is held out. where: its place in the config, for errors.
        rows: how many to take, evenly spaced; None or more than there are takes all.
        micro_batch_size: rows a batch. rank, world: this rank among those that see different rows.
        transform: `Task.batch_transform()`. seed: the run's. loader: as training reads.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        where: str,
        rows: int | None,
        micro_batch_size: int,
        rank: int,
        world: int,
        transform: Callable[[Batch], Batch] | None,
        seed: int,
        loader: LoaderSection,
        device: torch.device,
    ) -> None:
        if not len(dataset):
            raise DataError("the dataset has no rows to evaluate", where=where)
        self.rows = len(dataset) if rows is None else min(rows, len(dataset))
        self._dataset, self._where, self._transform = dataset, where, transform
        self._rank, self._world = rank, world
        self._seed, self._loader, self._device = seed, loader, device
        self._plan = EvenRows(
            num_samples=self.rows,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * world,
            seed=seed,
            order="sequential",
            drop_last=False,
            total=len(dataset),
        )

    @property
    def batches(self) -> int:
        """Batches of a rank in one pass over the rows."""
        return self._plan.batches_per_epoch

    def read(self, passes: int = 1) -> Generator[Batch, None, None]:
        """All batches, `passes` times over. Close the iterator to end its workers."""
        loader = MicroBatchLoader(
            self._dataset,
            self._plan,
            batch_transform=self._transform,
            rng=Randomness(self._seed),
            rank=self._rank,
            data_parallel=self._world,
            start_step=0,
            end_step=self.batches * passes,
            workers=self._loader.workers,
            prefetch=self._loader.prefetch,
            pin_memory=self._loader.pin_memory,
            device_type=self._device.type,
        )
        try:
            for batch in loader:
                yield without_failures(batch)
        except UnreadableError as error:
            raise DataError(
                error.what, where=self._where, hint="check the annotation file and its folder"
            ) from error


def without_failures(batch: Batch) -> Batch:
    """The same batch, with weight 0 on rows that another one stands in for."""
    lost = {failure.index for failure in batch.failures if failure.replaced}
    if not lost:
        return batch
    kept = torch.tensor([key.index not in lost for key in batch.keys], dtype=batch.sample_weights.dtype)
    return replace(batch, sample_weights=batch.sample_weights * kept)
