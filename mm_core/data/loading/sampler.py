"""The samples of each training step: a pure function of (seed, step, world), without state to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mm_core.contracts import DataRanks, Randomness, SampleKey
from mm_core.errors import PlanError, plural

_WINDOW, _WINDOWS = 64, 8
"""Maximum number of global batches sorted by length together, and minimum number of such windows in an
epoch: sorted in one window, a small dataset would have the same batches in every epoch."""

ATTEMPTS = 8
"""How many other samples are tried in place of an unreadable one before the run stops."""


Work = Callable[[int, Randomness], int]
"""`SupportsWork.work_at` of a dataset."""


class SlotSpec(NamedTuple):
    """A sample's key and weight: one row of a micro-batch. Rows of weight 0 fill up an incomplete batch."""

    key: SampleKey
    weight: float


class Order(Protocol):
    """Which samples each training step reads: a pure function of (seed, step, data-parallel ranks).

    It keeps no state, so a resumed run reads what the uninterrupted one would have read. It is sent to the
    data workers, so it pickles.
    """

    @property
    def batches_per_epoch(self) -> int:
        """Number of steps in which each sample is read about once."""

    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        """The micro-batches of samples that one data-parallel rank reads in a step, in order.

        Their number is the same in every step and on every rank. Their sizes may differ.

        Args:
            step: from 0.
            rank: this rank's number among the data-parallel ranks.
            data_parallel: number of data-parallel ranks.
        """

    def replacements(self, key: SampleKey) -> Iterator[int]:
        """The samples to try, one after the other, in place of an unreadable one; it is not among them."""

    def facts(self) -> dict[str, object]:
        """The plain values that determine the order, which a checkpoint stores."""


@dataclass(frozen=True)
class BatchPlan:
    """The order of samples that are shuffled, sequential or grouped by length: an endless stream of global
    batches over a map-style dataset.

    An epoch is an order of all samples, cut into global batches. With `drop_last` the remainder of an epoch
    is dropped. Otherwise its last batch is filled to full size with repeats of the epoch's samples at weight
    0, so that every rank runs the same number of micro-batches.

    Micro-batch m of a global batch belongs to data-parallel rank m % dp, as its (m // dp)-th. A global batch
    thus consists of the same samples in the same micro-batches at any world size; with `work`, of the same
    samples.

    Args:
        num_samples: samples in the dataset.
        micro_batch_size: samples of a rank's forward.
        global_batch_size: samples of a step, over all ranks.
        seed: the run's.
        order: of the samples in an epoch.
        drop_last: whether to drop the remainder of an epoch.
        repeat_first: whether every step uses the batch of step 0.
        lengths: int64 of each sample. If set, a global batch has samples of similar length, sorted, to
            reduce padding and waiting for other ranks. Batches and their order still change with the epoch.
        work: returns that of a sample. If set, the samples of a step are shared out by it: see `evenly`.

    Raises:
        PlanError: the sizes do not fit each other or the dataset.
    """

    num_samples: int
    micro_batch_size: int
    global_batch_size: int
    seed: int
    order: Literal["random", "sequential"]
    drop_last: bool
    repeat_first: bool = False
    lengths: Tensor | None = field(default=None, compare=False, repr=False)
    work: Work | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.global_batch_size % self.micro_batch_size:
            raise PlanError(
                f"a global batch of {self.global_batch_size} does not divide into micro-batches of "
                f"{self.micro_batch_size}",
                accepted=f"multiples of {self.micro_batch_size}",
                hint="change train.global_batch_size or train.micro_batch_size",
            )
        if self.num_samples < 1:
            raise PlanError("the dataset has no samples", hint="check the file that lists the samples")
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise PlanError(
                f"the dataset has {plural(self.num_samples, 'sample')}, fewer than a global batch of "
                f"{self.global_batch_size}, so every epoch would be dropped",
                hint="lower train.global_batch_size, or set data.loader.drop_last=false",
            )

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches of samples in one epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def global_batch(self, step: int) -> list[SlotSpec]:
        """The samples of a training step (from 0), over all ranks; with `repeat_first` those of step 0."""
        step = 0 if self.repeat_first else step
        epoch, batch = divmod(step, self.batches_per_epoch)
        order = self._epoch(epoch)
        first = batch * self.global_batch_size
        own = order[first : first + self.global_batch_size].tolist()
        repeats = order[torch.arange(self.global_batch_size - len(own)) % self.num_samples].tolist()
        weighted = [(index, 1.0) for index in own] + [(index, 0.0) for index in repeats]
        return [SlotSpec(SampleKey(epoch, index), weight) for index, weight in weighted]

    def facts(self) -> dict[str, object]:
        """The values that determine the samples of each step, without their lengths."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("lengths", "work")}
        return {**plain, "group_by_length": self.lengths is not None}

    def _epoch(self, epoch: int) -> Tensor:
        if self.lengths is None:
            return epoch_order(self.num_samples, self.order, self.seed, epoch)
        return grouped_order(self.lengths, self.global_batch_size, self.seed, epoch)

    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        """See `Order.micro_batches`: all are of `micro_batch_size`."""
        size = self.micro_batch_size
        if self.global_batch_size % (size * data_parallel):
            raise PlanError(
                f"a global batch of {self.global_batch_size} does not divide over "
                f"{plural(data_parallel, 'data-parallel rank')} in micro-batches of {size}",
                accepted=f"multiples of {size * data_parallel}",
                hint="change train.global_batch_size, train.micro_batch_size or the number of ranks",
            )
        rows = self.global_batch(step)
        if self.work is not None:
            rng = Randomness(self.seed)
            works = [self.work(key.index, rng.at("data", *key)) for key, _ in rows]
            return evenly(rows, works, size, data_parallel)[rank]
        count = self.global_batch_size // size
        return [rows[micro * size : (micro + 1) * size] for micro in range(rank, count, data_parallel)]

    def replacements(self, key: SampleKey) -> Iterator[int]:
        """See `Order.replacements`: up to ATTEMPTS of all samples, drawn from (seed, key, attempt)."""
        tried = {key.index}
        for attempt in range(1, min(ATTEMPTS, self.dataset_size - 1) + 1):
            index = Randomness(self.seed).seed32("replacement", *key, attempt) % self.dataset_size
            while index in tried:
                index = (index + 1) % self.dataset_size
            tried.add(index)
            yield index

    @property
    def dataset_size(self) -> int:
        """Number of samples in the dataset."""
        return self.num_samples


@dataclass(frozen=True)
class EvenRows(BatchPlan):
    """The rows of an evaluation: `num_samples` rows evenly spaced over a dataset of `total`, in order."""

    total: int = 0

    def global_batch(self, step: int) -> list[SlotSpec]:
        """Rows of one evaluation step, with the dataset's own indices; rows of weight 0 only fill up."""
        return [
            SlotSpec(SampleKey(0, key.index * self.total // self.num_samples), weight)
            for key, weight in super().global_batch(step)
        ]

    @property
    def dataset_size(self) -> int:
        """Number of samples in the dataset, not only of the evaluation's rows."""
        return self.total


@lru_cache(maxsize=4)
def epoch_order(num_samples: int, order: str, seed: int, epoch: int) -> Tensor:
    """The dataset's indices in the order of an epoch, int64 [num_samples]."""
    if order == "sequential":
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=Randomness(seed).generator("order", epoch))


@lru_cache(maxsize=4)
def grouped_order(lengths: Tensor, global_batch_size: int, seed: int, epoch: int) -> Tensor:
    """The dataset's indices in the order of an epoch, in global batches of similar length: int64 [N].

    The last samples, which make no complete batch, are in random order.

    Args:
        lengths: int64 [N], length of each sample.
        global_batch_size: samples of a step.
        seed: the run's.
        epoch: from 0.
    """
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


def evenly(
    rows: Sequence[SlotSpec], work: Sequence[int], size: int, ranks: int
) -> list[list[list[SlotSpec]]]:
    """The micro-batches of each rank, with about the same work in a step.

    From the row with the most work to the one with the least, each goes to the rank that has the least so far
    (Graham 1969, https://doi.org/10.1137/0117039), of those with fewer rows than their share. Each rank
    begins with its heaviest rows: ranks wait for each other in every micro-batch.

    Args:
        rows: of a step, a multiple of `size * ranks`.
        work: of each row.
        size: rows of a micro-batch.
        ranks: data-parallel ranks.
    """
    share = len(rows) // ranks
    found = [list[SlotSpec]() for _ in range(ranks)]
    room = [(0, rank) for rank in range(ranks)]
    for row in sorted(range(len(rows)), key=lambda row: -work[row]):
        total, rank = heappop(room)
        found[rank].append(rows[row])
        if len(found[rank]) < share:
            heappush(room, (total + work[row], rank))
    return [[own[first : first + size] for first in range(0, share, size)] for own in found]


class Slots:
    """The sampler for torch's DataLoader: one list of rows for each micro-batch from `first` on."""

    def __init__(self, order: Order, share: DataRanks, steps: range, per_step: int) -> None:
        self.order, self.share, self.steps, self.per_step, self.first = order, share, steps, per_step, 0

    def __iter__(self) -> Iterator[list[SlotSpec]]:
        return self._from(self.first)

    def _from(self, first: int) -> Iterator[list[SlotSpec]]:
        taken, left_out = divmod(first, self.per_step)
        for step in self.steps[taken:]:
            yield from self.order.micro_batches(step, self.share.rank, self.share.count)[left_out:]
            left_out = 0
