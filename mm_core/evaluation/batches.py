"""Batches of an evaluation: every row exactly once over all ranks, equally many batches on each rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from mm_core.config.sections import LoaderSection
from mm_core.contracts import Batch, DataRanks, Randomness
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.skipped import UnreadableError
from mm_core.data.loading.streams import BatchStream, held_out
from mm_core.errors import DataError
from mm_core.plan.samples import Samples


class EvaluatedEngine(Protocol):
    """The parts of an engine that an evaluation needs."""

    device: torch.device
    data_ranks: DataRanks

    def evaluating(self) -> AbstractContextManager[None]: ...


class EvaluationData:
    """The batches of one rank in an evaluation.

    Micro-batch m contains the same rows at any world size, and belongs to share m % count; every rank has
    equally many. A row that cannot be read gets weight 0: `MicroBatchLoader` replaces it by another one,
    which keeps the shapes, and lists it in `Batch.failures`.

    Args:
        samples: the held-out rows.
        where: config path of the dataset, for error messages.
        rows: number of rows to use, evenly spaced; None, or more than the dataset has, uses all.
        micro_batch_size: rows in a batch.
        ranks: which share of the rows this rank reads.
        transform: `Task.batch_transform()`.
        seed: the run's.
        loader: settings of the data loader, as in training.
        device: that batches are copied to.
        decode_seconds: see `MicroBatchLoader`.

    Raises:
        DataError: the dataset has no rows.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        where: str,
        rows: int | None,
        micro_batch_size: int,
        ranks: DataRanks,
        transform: Callable[[Batch], Batch] | None,
        seed: int,
        loader: LoaderSection,
        device: torch.device,
        decode_seconds: float | None = None,
    ) -> None:
        if not len(samples.dataset):
            raise DataError("the dataset has no rows to evaluate", where=where, hint="check its file")
        self.rows = samples.available if rows is None else min(rows, samples.available)
        self._dataset, self._where, self._transform = samples.dataset, where, transform
        self._share = ranks
        self._seed, self._loader, self._device = seed, loader, device
        self._decode_seconds = decode_seconds
        self._plan = samples.held_out(self.rows, micro_batch_size, ranks.count, seed)

    @property
    def batches(self) -> int:
        """Number of batches of a rank in one pass over the evaluation's rows."""
        return self._plan.batches_per_epoch

    def read(self, passes: int = 1) -> Generator[Batch, None, None]:
        """Reads all batches of the evaluation, `passes` times. Close the iterator to end its data workers."""
        loader = MicroBatchLoader(
            self._dataset,
            self._plan,
            batch_transform=self._transform,
            rng=Randomness(self._seed),
            share=self._share,
            steps=range(self.batches * passes),
            workers=self._loader.workers,
            prefetch=self._loader.prefetch,
            pin_memory=self._loader.pin_memory,
            device_type=self._device.type,
            decode_seconds=self._decode_seconds,
        )
        try:
            for batch in loader:
                yield without_failures(batch)
        except UnreadableError as error:
            raise DataError(
                error.what, where=self._where, hint="check the annotation file and its folder"
            ) from error


class StreamedEvaluation:
    """The batches of one rank in an evaluation of an IterableDataset or DataLoader: each pass reads it anew.

    Args:
        stream: this rank's.
        rows: number of rows to use over all ranks, the first ones, up to complete batches; None uses all.
    """

    rows = 0  # not known before they are read: none counts as unreadable
    batches = None

    def __init__(self, stream: BatchStream, rows: int | None) -> None:
        self._stream = stream
        self._most = None if rows is None else -(-rows // (stream.rows * stream.share.count))

    def read(self, passes: int = 1) -> Generator[Batch | None, None, None]:
        """Reads all batches of the evaluation, `passes` times; None follows the last one of each pass."""
        for _ in range(passes):
            yield from held_out(self._stream, self._most)
            yield None


def without_failures(batch: Batch) -> Batch:
    """An evaluation's batch with weight 0 for rows that replace unreadable ones."""
    lost = {failure.index for failure in batch.failures if failure.replaced}
    if not lost:
        return batch
    kept = torch.tensor([key.index not in lost for key in batch.keys], dtype=batch.sample_weights.dtype)
    return replace(batch, sample_weights=batch.sample_weights * kept)
