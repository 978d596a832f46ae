"""Samples in buckets, and their order: each micro-batch has one bucket, the same on all ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mm_core.contracts import Batch, Dataset, Randomness, SampleKey, SupportsRowSizes
from mm_core.data.loading.buckets import Bucket
from mm_core.data.loading.sampler import ATTEMPTS, SlotSpec, epoch_order
from mm_core.errors import PlanError, plural

Rests = Literal["pad", "drop", "keep"]


class SizedDataset(Dataset, SupportsRowSizes, Protocol):
    """A dataset that reads its rows in any size."""


class BucketedSamples:
    """A dataset whose samples have the sizes of their buckets. Satisfies `Dataset` and `SupportsSampleAt`.

    Args:
        dataset: reads a row in any size.
        buckets: of the rows.
        of_row: int64 [R], the number of each row's bucket; -1: the row is not used.
    """

    def __init__(self, dataset: SizedDataset, buckets: tuple[Bucket, ...], of_row: Tensor) -> None:
        self.dataset, self.buckets, self.of_row = dataset, buckets, of_row

    def __len__(self) -> int:
        return len(self.dataset.epoch_rows(0))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample(0, index, None)

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """Reads a sample in its bucket's size; `rng` is at ("data", epoch, index)."""
        return self._sample(int(rng.path[-2]), index, rng)

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Collates samples of one bucket."""
        batch: Batch = self.dataset.collate(samples)
        return batch

    def of_epoch(self, epoch: int) -> Tensor:
        """The number of the bucket of each sample in an epoch, int64 [N]; -1: it is not used."""
        return self.of_row[self.dataset.epoch_rows(epoch)]

    def _sample(self, epoch: int, index: int, rng: Randomness | None) -> dict[str, Any]:
        row = int(self.dataset.epoch_rows(epoch)[index])
        return self.dataset.sample_of(row, self.buckets[int(self.of_row[row])].size, rng)


class _Group(NamedTuple):
    """The micro-batches that share a bucket; `first` is the place of their first sample in its stream."""

    bucket: int
    first: int


@dataclass(frozen=True)
class BucketOrder:
    """The order of samples in buckets. Satisfies `Order`.

    A step has a fixed number of micro-batches at any number of ranks; `group` of them in turn share a bucket,
    whose samples they divide. An epoch has all groups of all buckets, shuffled; a step may begin in one epoch
    and end in the next.

    Args:
        samples: with their buckets.
        micro_batches_per_step: over all ranks.
        group: micro-batches that share a bucket; the number of ranks divides it.
        seed: the run's.
        order: of the samples in a bucket and of the groups; sequential: bucket after bucket.
        rests: what becomes of the samples that fill no group: padded with repeats of weight 0, dropped, or
            kept for the next epoch.
        repeat_first: whether every step uses the samples of step 0.
        held_out: number of samples, evenly spaced, in an evaluation: epoch 0 again and again; None: training.

    Raises:
        PlanError: no group is ever full.
    """

    samples: BucketedSamples
    micro_batches_per_step: int
    group: int
    seed: int
    order: Literal["random", "sequential"] = "random"
    rests: Rests = "pad"
    repeat_first: bool = False
    held_out: int | None = None
    _known: dict[int, list[Tensor]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _totals: list[Tensor] = field(default_factory=list, init=False, compare=False, repr=False)
    _ends: list[int] = field(default_factory=list, init=False, compare=False, repr=False)
    _shuffled: dict[int, list[_Group]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self._groups(0) and (self.rests != "keep" or not int(self._total(0).sum())):
            raise PlanError(
                f"no bucket has the samples of {plural(self.group, 'micro-batch')}, so every epoch would be"
                " dropped",
                where="data.loader.rests",
                hint="set rests: pad, or lower train.global_batch_size",
            )

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker: without what it can compute again."""
        return {**self.__dict__, "_known": {}, "_totals": [], "_ends": [], "_shuffled": {}}

    @property
    def batches_per_epoch(self) -> int:
        """See `Order.batches_per_epoch`."""
        groups = len(self._groups(0))
        if self.rests == "keep":
            sizes = [self.group * bucket.micro_batch_size for bucket in self.samples.buckets]
            whole = zip(self._total(0).tolist(), sizes, strict=True)
            groups = -(-sum(count / size for count, size in whole) // 1)
        return max(1, int(-(-groups // (self.micro_batches_per_step // self.group))))

    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        """See `Order.micro_batches`: their sizes are those of their buckets."""
        if self.group % data_parallel:
            raise PlanError(
                f"{plural(self.group, 'micro-batch')} of one bucket cannot be divided among"
                f" {plural(data_parallel, 'data-parallel rank')}",
                accepted=f"multiples of {data_parallel}",
                hint="change train.global_batch_size, data.loader.buckets_per_step or the number of ranks",
            )
        count = self.micro_batches_per_step // self.group
        if self.held_out is not None:
            step %= self.batches_per_epoch
        first = 0 if self.repeat_first else step * count
        return [
            rows
            for number in range(first, first + count)
            for rows in islice(self._group(number), rank, None, data_parallel)
        ]

    def replacements(self, key: SampleKey) -> Iterator[int]:
        """See `Order.replacements`: up to ATTEMPTS of the same bucket, drawn from (seed, key, attempt)."""
        bucket = int(self.samples.of_epoch(key.epoch)[key.index])
        return self._drawn(key, "replacement", self._members(key.epoch)[bucket])

    def elsewhere(self, key: SampleKey) -> Iterator[int]:
        """Samples of other buckets, for a micro-batch of which none of the bucket can be read."""
        of_epoch = self.samples.of_epoch(key.epoch)
        others = ((of_epoch >= 0) & (of_epoch != of_epoch[key.index])).nonzero().flatten()
        return self._drawn(key, "elsewhere", others)

    def facts(self) -> dict[str, object]:
        """The values that determine the order of samples, without their buckets."""
        return {
            "buckets": [[*bucket.size, bucket.micro_batch_size] for bucket in self.samples.buckets],
            **{name: getattr(self, name) for name in ("seed", "order", "rests", "group", "repeat_first")},
            "micro_batches_per_step": self.micro_batches_per_step,
        }

    def counts(self) -> list[tuple[int, int, int]]:
        """For each bucket, its samples in epoch 0, how many rows of weight 0 pad them, and how many of them
        are dropped."""
        found = self._total(0).tolist()
        rests = [
            count % (bucket.micro_batch_size * self.group)
            for count, bucket in zip(found, self.samples.buckets, strict=True)
        ]
        padded = [-rest % self.group if self.rests == "pad" else 0 for rest in rests]
        dropped = [rest if self.rests == "drop" else 0 for rest in rests]
        return [*zip(found, padded, dropped, strict=True)]

    def largest(self) -> list[list[SlotSpec]]:
        """A group of the epoch's micro-batches with the most pixels."""
        buckets = self.samples.buckets
        groups = self._groups(0) or [_Group(int(self._total(0).argmax()), 0)]
        pixels = [
            prod(buckets[group.bucket].size) * buckets[group.bucket].micro_batch_size for group in groups
        ]
        return self._micro_batches_of(0, groups[pixels.index(max(pixels))])

    # -- the stream of groups ---------------------------------------------------------------------

    def _drawn(self, key: SampleKey, purpose: str, pool: Tensor) -> Iterator[int]:
        tried = {key.index}
        for attempt in range(1, ATTEMPTS + 1):
            place = Randomness(self.seed).seed32(purpose, *key, attempt) % max(len(pool), 1)
            turned = (int(pool[(place + turn) % len(pool)]) for turn in range(min(len(pool), ATTEMPTS + 1)))
            index = next((each for each in turned if each not in tried), None)
            if index is None:
                return
            tried.add(index)
            yield index

    def _group(self, number: int) -> list[list[SlotSpec]]:
        """The micro-batches of a group, counted over all epochs."""
        while not self._ends or self._ends[-1] <= number:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._groups(len(self._ends))))
        epoch = bisect_right(self._ends, number)
        if epoch not in self._shuffled:
            self._shuffled.clear()
            self._shuffled[epoch] = groups = self._groups(epoch)
            if self.order == "random":
                drawn = Randomness(self.seed).generator("batches", epoch)
                groups[:] = [groups[place] for place in torch.randperm(len(groups), generator=drawn).tolist()]
        place = number - (self._ends[epoch - 1] if epoch else 0)
        return self._micro_batches_of(epoch, self._shuffled[epoch][place])

    def _micro_batches_of(self, epoch: int, group: _Group) -> list[list[SlotSpec]]:
        size = self.samples.buckets[group.bucket].micro_batch_size
        keys = self._keys(epoch, group, size * self.group)
        rows = [SlotSpec(key, 1.0) for key in keys]
        if len(rows) < size * self.group:
            size = -(-len(rows) // self.group)  # a rest in smaller micro-batches needs less padding
            rows += [SlotSpec(keys[n % len(keys)], 0.0) for n in range(size * self.group - len(keys))]
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def _keys(self, epoch: int, group: _Group, most: int) -> list[SampleKey]:
        """The samples of a group; with `keep`, those of earlier epochs come first."""
        bucket, first = group
        if self.rests != "keep":
            own = self._members(epoch)[bucket][first : first + most].tolist()
            return [SampleKey(epoch, index) for index in own]
        found: list[SampleKey] = []
        begin = next(e for e in range(epoch + 1) if int(self._total(e)[bucket]) > first)
        for each in range(begin, epoch + 1):
            before = int(self._total(each - 1)[bucket]) if each else 0
            start = max(first - before, 0)
            own = self._members(each)[bucket][start : start + most - len(found)].tolist()
            found += [SampleKey(each, index) for index in own]
        return found

    def _groups(self, epoch: int) -> list[_Group]:
        """The groups of an epoch, bucket after bucket."""
        found: list[_Group] = []
        now = self._total(epoch).tolist()
        before = self._total(epoch - 1).tolist() if epoch else [0] * len(now)
        for number, bucket in enumerate(self.samples.buckets):
            size = bucket.micro_batch_size * self.group
            if self.rests == "keep":
                firsts = range(before[number] // size * size, now[number] // size * size, size)
            else:
                own = now[number] - before[number]
                firsts = range(0, own if self.rests == "pad" else own // size * size, size)
            found += [_Group(number, first) for first in firsts]
        return found

    def _total(self, epoch: int) -> Tensor:
        """Samples of each bucket up to the end of an epoch, int64 [K]."""
        while len(self._totals) <= epoch:
            of_epoch = self._used(len(self._totals))
            counts = of_epoch[of_epoch >= 0].bincount(minlength=len(self.samples.buckets))
            self._totals.append(counts + (self._totals[-1] if self._totals else 0))
        return self._totals[epoch]

    def _used(self, epoch: int) -> Tensor:
        """The bucket of each sample; -1 also for those that an evaluation leaves out."""
        of_epoch = self.samples.of_epoch(epoch)
        if self.held_out is None:
            return of_epoch
        there = (of_epoch >= 0).nonzero().flatten()
        kept = there[torch.arange(self.held_out) * len(there) // max(self.held_out, 1)]
        return torch.full_like(of_epoch, -1).index_copy(0, kept, of_epoch[kept])

    def _members(self, epoch: int) -> list[Tensor]:
        """The samples of each bucket in the order of an epoch."""
        if epoch not in self._known:
            while len(self._known) > 3:
                del self._known[next(iter(self._known))]
            of_epoch = self._used(epoch)
            order = epoch_order(len(of_epoch), self.order, self.seed, epoch)
            of_epoch = of_epoch[order]
            sorted_ = order[of_epoch.argsort(stable=True)]
            counts = (of_epoch + 1).bincount(minlength=len(self.samples.buckets) + 1)
            self._known[epoch] = list(torch.split(sorted_, counts.tolist()))[1:]
        return self._known[epoch]


def in_evaluation(samples: BucketedSamples, rows: int, shares: int, seed: int) -> BucketOrder:
    """The order of `rows` held-out samples over `shares` ranks: each once, bucket after bucket."""
    return BucketOrder(samples, shares, shares, seed, "sequential", held_out=rows)


def used(samples: BucketedSamples) -> int:
    """Number of samples that have a bucket."""
    return int((samples.of_epoch(0) >= 0).sum())
