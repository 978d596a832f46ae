"""Which samples a step sees: a pure function of (seed, step, world), with no state to save."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mm_core.contracts import Randomness, SampleKey
from mm_core.errors import PlanError

_WINDOW, _WINDOWS = 64, 8
"""Global batches, at most, whose samples are sorted by length together, and the least of such windows in an
epoch: sorted as one, a small dataset would make the same batches in each epoch."""


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

    With `lengths`, int64 of each sample, those of a global batch are of similar length and stand in
    their order, so that neither padding nor the wait for other ranks takes much; which are together and
    the order of the batches still change with the epoch.

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
    lengths: Tensor | None = field(default=None, compare=False, repr=False)

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
        order = self._epoch(epoch)
        first = batch * self.global_batch_size
        own = order[first : first + self.global_batch_size].tolist()
        repeats = order[torch.arange(self.global_batch_size - len(own)) % self.num_samples].tolist()
        weighted = [(index, 1.0) for index in own] + [(index, 0.0) for index in repeats]
        return [SlotSpec(SampleKey(epoch, index), weight) for index, weight in weighted]

    def facts(self) -> dict[str, object]:
        """What the order follows from, beside the samples' lengths."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lengths"}
        return {**plain, "group_by_length": self.lengths is not None}

    def _epoch(self, epoch: int) -> Tensor:
        if self.lengths is None:
            return epoch_order(self.num_samples, self.order, self.seed, epoch)
        return grouped_order(self.lengths, self.global_batch_size, self.seed, epoch)

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


@lru_cache(maxsize=4)
def grouped_order(lengths: Tensor, global_batch_size: int, seed: int, epoch: int) -> Tensor:
    """int64 [N]: the dataset's indices in the order of that epoch, by global batches of similar length. The
    remainder, which makes no whole batch, is any."""
    order = epoch_order(len(lengths), "random", seed, epoch)
    count = len(order) // global_batch_size
    if not count:
        return order
    whole = count * global_batch_size
    window = min(_WINDOW, max(1, count // _WINDOWS)) * global_batch_size
    batches = []
    for first in range(0, whole, window):
        part = order[first : min(first + window, whole)]
        batches.append(part[lengths[part].argsort(stable=True)].view(-1, global_batch_size))
    shuffled = torch.randperm(count, generator=Randomness(seed).generator("batches", epoch))
    return torch.cat([torch.cat(batches)[shuffled].flatten(), order[whole:]])
