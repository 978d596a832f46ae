"""A dataset under test: its samples and batches as the core reads them, and files that are damaged."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mm_core.contracts import (
    DataRanks,
    Dataset,
    Randomness,
    SampleKey,
    SupportsCheckMicroBatch,
    SupportsSampleAt,
    seeded,
)
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.errors import ContractError, MMError
from mm_core.testing.common import KindProbe
from mm_core.testing.kit import Probe

SEED = 7
"""The run's seed in all checks."""
_STEPS = 4


def expect_no_weights(probe: Probe, what: str, sent: object, hint: str) -> None:
    """Checks that an object that is sent to data workers refers to no modules or numbers of a model.

    Args:
        probe: the component.
        what: the object, for the ContractError.
        sent: the object.
        hint: for the ContractError.
    """
    finder = _FindWeights(io.BytesIO())
    finder.dump(sent)
    found = ", ".join(finder.found[:3])
    probe.expect(not found, f"{what} carries weights to data workers: {found}", hint=hint)


class _FindWeights(pickle.Pickler):
    """A pickler that notes the modules and floating-point tensors among what it writes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[str] = []

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, nn.Module) or (isinstance(obj, Tensor) and obj.is_floating_point()):
            self.found.append(type(obj).__name__)


class DatasetProbe(KindProbe):
    """A dataset under test, with the samples and batches that the core makes of it."""

    @cached_property
    def dataset(self) -> Any:
        """The small instance."""
        return self.build()

    def build(self, **changes: object) -> Any:
        """Builds a new dataset as the core does; draws of its constructor depend on the seed alone."""
        with seeded(Randomness(SEED).at("dataset")):
            return self.probe.build(**changes)

    def sample(self, index: int, epoch: int = 0, dataset: Any = None, drawn: int | None = None) -> Any:
        """A sample as the loader reads it: what it draws depends on the seed, the epoch and the index, or on
        another index (`drawn`)."""
        dataset, rng = self.dataset if dataset is None else dataset, Randomness(SEED)
        drawn = index if drawn is None else drawn
        with seeded(rng.at("draws", epoch, drawn)):
            if isinstance(dataset, SupportsSampleAt):
                return dataset.sample_at(index, rng.at("data", epoch, drawn))
            return dataset[index]

    @cached_property
    def files(self) -> list[Path]:
        """The files of the small instance."""
        _ = self.probe.config  # writes them
        return sorted(path for path in self.probe.folder.rglob("*") if path.is_file())

    @cached_property
    def rows(self) -> int:
        """Number of samples in a micro-batch: 2, unless the dataset takes only 1."""
        if len(self.dataset) > 1 and isinstance(self.dataset, SupportsCheckMicroBatch):
            try:
                type(self.dataset).check_micro_batch(2, self.probe.config.options)
            except ContractError:
                return 1
        return min(2, len(self.dataset))

    def loader(self, dataset: Any = None, start: int = 0, workers: int = 0) -> MicroBatchLoader:
        """The core's loader, over more than an epoch."""
        chosen: Dataset = self.dataset if dataset is None else dataset
        size, rows = len(chosen), self.rows
        steps = max(_STEPS, size // rows + 2)
        return MicroBatchLoader(
            chosen,
            BatchPlan(size, rows, rows, SEED, "random", drop_last=False),
            batch_transform=None,
            rng=Randomness(SEED),
            share=DataRanks(),
            steps=range(start, steps),
            workers=workers,
            prefetch=2,
            pin_memory=False,
            device_type="cpu",
        )

    def batch(
        self, weights: Sequence[float] = (), rows: Sequence[int] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """A batch of some samples, and the samples with the keys and weights that the loader adds.

        Args:
            weights: of the samples; (): 1 each.
            rows: the samples' numbers; None: the first ones.
        """
        rows = range(self.rows) if rows is None else rows
        samples = [
            {**self.sample(index), "key": SampleKey(0, index), "weight": weight}
            for index, weight in zip(rows, weights or [1.0] * len(rows), strict=True)
        ]
        for sample in samples:
            sample.pop("missing", None)
        with seeded(Randomness(SEED).at("collate")):
            return self.dataset.collate(samples), samples


def equal(first: object, second: object) -> bool:
    """Whether two samples or batches are equal, bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if dataclasses.is_dataclass(first):
        return equal(vars(first), vars(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, MMError):
        return str(first) == str(second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second))
    return first is second or first == second  # NaN equals itself alone


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """Within the block, a file has other content; None: it is missing."""
    held = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(held)
