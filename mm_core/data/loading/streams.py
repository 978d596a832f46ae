"""Micro-batches of an IterableDataset or DataLoader of torch, in the order in which it yields them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mm_core.contracts import (
    Batch,
    DataRanks,
    DictBatch,
    Randomness,
    SampleKey,
    seed_generators,
    seeded,
)
from mm_core.data.loading.loader import AuthorCode, CodeError, Fault, PixelRange, WorkerTraceback
from mm_core.data.loading.plain import PlainBatches, PlainSamples
from mm_core.data.loading.workers import StartWorker, deaths_explained, read_by_workers, start_server
from mm_core.errors import DataError, MMError, PeerError, plural
from mm_core.runtime.ranks import gather_rows

_DICT = "a dict of tensors [B,...] and lists of B values, or a Batch"


class BatchStream:
    """The micro-batches of one share of the data, epoch by epoch.

    An IterableDataset is read by one worker process at most, since several would each read all of it, and
    its samples are collated like those of a Dataset. A DataLoader keeps its own batches, `collate_fn` and
    workers. Random numbers are seeded from (seed, epoch, batch).

    Args:
        source: the author's.
        transform: `Task.batch_transform()`.
        rng: the root of the run's randomness.
        share: which share of the data this rank reads.
        rows: samples in a micro-batch.
        whole: whether every batch must have that many.
        workers: number of worker processes for an IterableDataset.
        pin_memory: whether its batches are page-locked.
        ranks: number of ranks; several compare their first batches.
        note: receives a message for the user.

    Raises:
        ContractError: the source is neither.
    """

    def __init__(
        self,
        source: PlainBatches,
        *,
        transform: Callable[[Batch], Batch] | None,
        rng: Randomness,
        share: DataRanks,
        rows: int,
        whole: bool,
        workers: int,
        pin_memory: bool,
        ranks: int,
        note: Callable[[str], None],
    ) -> None:
        self.where, self.share, self.rows, self._whole, self._note = source.where, share, rows, whole, note
        opened = source.open(share.rank, share.count)
        self._code = AuthorCode(opened, transform, rng)
        self._own: _Samples | None = None
        if isinstance(opened, DataLoader):
            self._loader: DataLoader[Any] = opened
        else:
            self._own = _Samples(opened, rng, rows, whole)
            workers = min(workers, 1)
            self._loader = DataLoader(
                self._own,
                batch_size=None,
                num_workers=workers,
                pin_memory=pin_memory,
                worker_init_fn=StartWorker() if workers else None,
                multiprocessing_context=start_server([__name__]) if workers else None,
            )
        self._compared = ranks == 1

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch, from 0. Workers end with the iterator."""
        self._begin(number)
        rng, seen = self._code.rng, PixelRange(self._code)
        with seeded(rng.at("stream", number)):
            reading = self._start()
            batch = self._read(reading, number, 0)
        try:
            for place in count(1):
                if batch is None:
                    return
                seen(batch)
                yield batch
                with seeded(rng.at("stream", number, place)):
                    batch = self._read(reading, number, place)
        finally:
            del reading  # a traceback may keep this frame alive, and with it the workers

    def _start(self) -> Iterator[Any]:
        if self._own is not None:
            return read_by_workers(self._loader, self._own)
        with self._code.guarded(self.where):
            return iter(self._loader)

    def _begin(self, epoch: int) -> None:
        """Sets the epoch of the author's samplers and datasets, as torch's own training loops do."""
        if self._own is not None:
            self._own.epoch = epoch
        held = [self._loader, *(getattr(self._loader, n, None) for n in ("sampler", "batch_sampler"))]
        held += [getattr(held[2], "sampler", None), self._code.author]
        for one in {id(each): each for each in held}.values():
            if callable(known := getattr(one, "set_epoch", None)):
                known(epoch)

    def _read(self, reading: Iterator[Any], epoch: int, number: int) -> Batch | None:
        with self._code.guarded(self.where), deaths_explained(reading):
            raw = next(reading, None)
        if isinstance(raw, Fault):
            raise raw.error from WorkerTraceback(raw.trace)
        if raw is None:
            return None
        batch = self._lifted(raw)
        size = len(batch.sample_weights)
        if size > self.rows or (self._whole and number == 0 and size < self.rows):
            raise DataError(
                f"a batch has {plural(size, 'row')}, but train.micro_batch_size is {self.rows}",
                where=self.where,
                hint="give the DataLoader this batch_size, or change train.micro_batch_size",
            )
        first = (number * self.share.count + self.share.rank) * self.rows  # no other rank's batch has these
        keys = [SampleKey(epoch, first + row) for row in range(size)]
        return self._code.finished(replace(batch, keys=keys), [epoch, first], "the loader's batch")

    def _lifted(self, raw: Any) -> Batch:
        """A batch as the loader yields it, as a Batch."""
        if isinstance(raw, Batch):
            return raw
        values = dict(self._code.checked(raw, Mapping, f"a batch of {self.where}", _DICT))
        sizes = {
            name: len(value)
            for name, value in values.items()
            if isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim())
        }
        if len(set(sizes.values())) != 1:
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no tensor"
            raise CodeError(
                f"the values of a batch of {self.where} have no common number of rows: {shown}",
                where=self._code.place,
                accepted=_DICT,
            )
        (size,) = set(sizes.values())
        ids = values.get("id", range(size))
        keys = [SampleKey(0, row) for row in range(size)]
        return DictBatch(keys, torch.ones(size), [str(one) for one in ids], values=values)

    def agree(self, batches: Sequence[Batch], fault: MMError | None) -> list[int]:
        """The number of batches of each rank, -1 for a failed one. All ranks call this together.

        The first call compares the ranks' batches, and warns if they read the same rows.

        Args:
            batches: that this rank has read.
            fault: this rank's error in reading them; it is raised here.
        """
        digest = 0 if self._compared else digest_of(batches)
        table = gather_rows([len(batches) if fault is None else -1.0, self.share.rank, digest])
        if fault is not None:
            raise fault
        if not self._compared:
            self._compare(table)
        return table[:, 0].int().tolist()

    def _compare(self, table: Tensor) -> None:
        """Warns once if two shares of the data begin with the same rows. DataError if one share differs."""
        self._compared = True
        shares: dict[int, tuple[int, int]] = {}
        seen: dict[int, int] = {}
        for rank, (_, share, digest) in enumerate(table.long().tolist()):
            first, known = shares.setdefault(share, (rank, digest))
            if known != digest:
                raise DataError(
                    f"ranks {first} and {rank} compute the same samples, but their loaders yield others",
                    where=self.where,
                    hint="divide the rows by the arguments `rank` and `world`: they count shares, not ranks",
                )
            if first != rank:
                continue
            if digest and digest in seen:
                self._note(
                    f"warning: ranks {seen[digest]} and {rank} read the same rows of {self.where}, so one of"
                    " them computes nothing new: give its constructor the arguments `rank` and `world`, or"
                    " the DataLoader a DistributedSampler"
                )
                return
            seen[digest] = rank


class TrainingStream:
    """The micro-batches of a training run from a `BatchStream`: the next epoch follows when one is over.

    An epoch ends on all ranks in the same step; its rest that fills no step is dropped.

    Args:
        stream: this rank's.
        per_step: micro-batches in a step.
        steps: the steps to take, from 0.
        position: `facts` of a checkpoint after as many steps as were taken; {} begins anew.
        repeat_first: whether every step uses the batches of the first.
    """

    def __init__(
        self,
        stream: BatchStream,
        per_step: int,
        steps: range,
        position: Mapping[str, Any],
        repeat_first: bool,
    ) -> None:
        self.stream, self.per_step, self.steps, self.repeat_first = stream, per_step, steps, repeat_first
        # A run that fails after reading a step saves the steps before it.
        key = "after" if position.get("step") == steps.start else "before"
        self._before = self._after = tuple(position.get(key, (0, 0)))
        self._read = steps.start

    def facts(self) -> dict[str, object]:
        """The number of steps read, and (epoch, its micro-batches taken) before and after the last of them:
        the same on all ranks."""
        return {"step": self._read, "before": [*self._before], "after": [*self._after]}

    def __iter__(self) -> Iterator[Batch]:
        """Yields the micro-batches; those before the position are read and dropped first."""
        batches: list[Batch] = []
        epoch, taken = self._after
        reading, skipped = self.stream.epoch(epoch), taken
        for step in self.steps:
            while not (batches and self.repeat_first):
                batches, fault = [], None
                try:
                    deque(islice(reading, skipped), maxlen=0)
                    batches = list(islice(reading, self.per_step))
                except MMError as error:
                    fault = error
                skipped, found = 0, self.stream.agree(batches, fault)
                if not ended(found, len(batches), self.per_step, self.stream.where, step + 1):
                    taken += self.per_step
                    break
                if not taken:
                    raise DataError(
                        f"an epoch has fewer than the {plural(self.per_step, 'batch')} of a step",
                        where=self.stream.where,
                        hint="lower train.global_batch_size",
                    )
                epoch, taken = epoch + 1, 0
                reading = self.stream.epoch(epoch)
            self._before, self._after, self._read = self._after, (epoch, taken), step + 1
            yield from batches


def held_out(stream: BatchStream, most: int | None) -> Iterator[Batch]:
    """All batches of an evaluation, equally many on each rank: a rank without further rows repeats its last
    batch with weight 0.

    Args:
        stream: this rank's.
        most: number of batches at most; None reads all.

    Raises:
        DataError: a rank has no rows.
    """
    reading, last = stream.epoch(0), None
    for number in count():
        batch, fault = None, None
        try:
            batch = next(reading, None) if most is None or number < most else None
        except MMError as error:
            fault = error
        if not any(stream.agree([] if batch is None else [batch], fault)):
            return
        last = batch if batch is not None else last
        if last is None:
            raise DataError(
                "this rank has no rows to evaluate, but others have", where=stream.where,
                hint="divide the rows so that each rank has some",
            )  # fmt: skip
        yield last if batch is not None else replace(last, sample_weights=last.sample_weights * 0)


def ended(found: Sequence[int], own: int, wanted: int, where: str, step: int) -> bool:
    """Whether all ranks have reached the end of their epoch.

    Args:
        found: each rank's number of micro-batches for the step; -1: reading them failed.
        own: this rank's.
        wanted: number in a step.
        where: key of the data.
        step: from 1.

    Raises:
        DataError: only some ranks have.
    """
    short = [rank for rank, own in enumerate(found) if 0 <= own < wanted]
    if short and len(short) < len(found):
        kind = DataError if own < wanted else PeerError  # one rank's sentence is shown
        raise kind(
            f"the loader of rank {', '.join(map(str, short))} has no rows for step {step}, but others have",
            where=where,
            accepted=f"loaders that yield equally many batches on each of the {plural(len(found), 'rank')}",
            hint="divide the rows evenly, or drop the rest of them",
        )
    return bool(short)


def digest_of(batches: Sequence[Batch]) -> int:
    """A checksum of the tensors in a rank's batches; 0 without any."""
    found = 0
    for batch in batches:
        for field in fields(batch):
            value = getattr(batch, field.name)
            values = value.values() if isinstance(value, dict) else [value]
            for tensor in values if field.name != "sample_weights" else ():
                if isinstance(tensor, Tensor):
                    found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


class _Samples(AuthorCode, IterableDataset[Batch | Fault]):
    """The batches of an IterableDataset, made where it is read."""

    def __init__(self, dataset: Any, rng: Randomness, rows: int, whole: bool) -> None:
        super().__init__(dataset, None, rng)
        self.rows, self.whole, self.epoch = rows, whole, 0

    def __iter__(self) -> Iterator[Batch | Fault]:
        try:
            yield from self._batches()
        except MMError as error:
            yield Fault.of(error)

    def _batches(self) -> Iterator[Batch]:
        reading: Iterator[Any] | None = None
        for number in count():
            seed_generators(self.rng.at("rows", self.epoch, number))
            with self.guarded("the IterableDataset"):
                reading = iter(self.author) if reading is None else reading
                samples = list(islice(reading, self.rows))
            if len(samples) < (self.rows if self.whole else 1):
                return
            first = number * self.rows
            keyed = [
                {**self.checked(sample, Mapping, f"sample {first + row}", "a plain dict"), "weight": 1.0,
                 "key": SampleKey(self.epoch, first + row)}
                for row, sample in enumerate(samples)
            ]  # fmt: skip
            with self.guarded("collate"):
                yield PlainSamples(self.author).collate(keyed)
