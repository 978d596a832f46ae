"""Which samples a step sees: a pure function of (seed, step, world), with no state to save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mm_core.contracts import Randomness, SampleKey
from mm_core.errors import PlanError


class SlotSpec(NamedTuple):
    """One row of a micro-batch. A row of weight 0 only fills up a ragged batch."""

    key: SampleKey
    weight: float


@dataclass(frozen=True)
class BatchPlan:
    """The infinite stream of global batches over a map-style dataset.

    An epoch is an order of all samples, cut into global batches. With `drop_last` the remainder of
    an epoch is left out; without, its last batch is ragged: filled to full size with repeats of
    that epoch's samples at weight 0, so that every rank runs as many micro-batches as the others.

    Micro-batch m of a global batch belongs to data-parallel rank m % dp, as its (m // dp)-th, so
    that the global batch is the same set, in the same micro-batches, at any world size.

    Raises:
        PlanError: sizes that do not fit each other or the dataset.
    """

    num_samples: int
    micro_batch_size: int
    global_batch_size: int
    seed: int
    order: Literal["random", "sequential"]
    drop_last: bool
    repeat_first: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size % self.micro_batch_size:
            raise PlanError(
                f"a global batch of {self.global_batch_size} does not divide into micro-batches of "
                f"{self.micro_batch_size}",
                accepted=f"multiples of {self.micro_batch_size}",
                hint="change train.global_batch_size or train.micro_batch_size",
            )
        if self.num_samples < 1:
            raise PlanError("the dataset has no samples")
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise PlanError(
                f"the dataset has {self.num_samples} samples, fewer than a global batch of "
                f"{self.global_batch_size}, so that every epoch would be dropped",
                hint="lower train.global_batch_size, or set data.loader.drop_last=false",
            )

    @property
    def batches_per_epoch(self) -> int:
        """Global batches that one epoch makes."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def global_batch(self, step: int) -> list[SlotSpec]:
        """The rows of step `step` (from 0), over all ranks; with `repeat_first` those of step 0."""
        step = 0 if self.repeat_first else step
        epoch, batch = divmod(step, self.batches_per_epoch)
        order = epoch_order(self.num_samples, self.order, self.seed, epoch)
        first = batch * self.global_batch_size
        real = min(self.global_batch_size, self.num_samples - first)
        places = [
            first + slot if slot < real else (slot - real) % self.num_samples
            for slot in range(self.global_batch_size)
        ]
        indices = order[torch.tensor(places)].tolist()
        return [
            SlotSpec(SampleKey(epoch, index), 1.0 if slot < real else 0.0)
            for slot, index in enumerate(indices)
        ]

    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        """What data-parallel rank `rank` of `data_parallel` reads in a step, in order."""
        size = self.micro_batch_size
        if self.global_batch_size % (size * data_parallel):
            raise PlanError(
                f"a global batch of {self.global_batch_size} does not divide over {data_parallel} "
                f"data-parallel ranks in micro-batches of {size}",
                accepted=f"multiples of {size * data_parallel}",
                hint="change train.global_batch_size, train.micro_batch_size or the number of ranks",
            )
        rows = self.global_batch(step)
        count = self.global_batch_size // size
        return [rows[micro * size : (micro + 1) * size] for micro in range(rank, count, data_parallel)]


@lru_cache(maxsize=4)
def epoch_order(num_samples: int, order: str, seed: int, epoch: int) -> Tensor:
    """int64 [num_samples]: the dataset's indices in the order of that epoch."""
    if order == "sequential":
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=Randomness(seed).generator("order", epoch))
