"""`mm cache build`: encodes what a run's feature cache lacks, on any number of ranks and hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Features,
    Randomness,
    SupportsCache,
    TaskModule,
)
from mm_core.data.cache.claims import Claims
from mm_core.data.cache.keys import FAULTY
from mm_core.data.cache.reading import Read, Reading, Wanted
from mm_core.data.cache.samples import FAULT, on_host
from mm_core.data.cache.shards import Keys
from mm_core.data.loading.loader import Fault, WorkerTraceback
from mm_core.data.loading.seeding import build_split
from mm_core.data.loading.workers import (
    StartWorker,
    deaths_explained,
    start_server,
    starting,
    starts_explained,
)
from mm_core.device import current_device
from mm_core.errors import CacheError
from mm_core.loading.frozen import load_frozen
from mm_core.plan import RunCache, build_task, check_data, in_buckets, open_cache
from mm_core.runtime.ranks import Ranks

_MEDIA, _TEXTS = 128, 1024
"""Most samples, and most texts, of a shard."""

_TEXTS_AT_ONCE = 16
_EVERY = 5.0  # seconds between two lines of progress
_WAIT = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a build of a cache is, over all ranks.

    Attributes:
        what: `samples` or `texts`.
        done: of `of`, with those that were there before.
        seconds: left, as far as this can be known.
    """

    what: str
    done: int
    of: int
    seconds: float | None


@dataclass
class Built:
    """What one rank has encoded, by part, and the samples that cannot be read."""

    encoded: dict[str, int] = field(default_factory=dict)
    unreadable: int = 0


def build_cache(config: RunConfig, show: Callable[[Progress], None]) -> Built:
    """Encodes everything that a run's cache lacks; called by each rank, in a process group.

    Any number of builds may fill one cache at a time. One that was stopped goes on where it was.

    Args:
        config: of the run.
        show: receives the progress.

    Returns:
        What all ranks have encoded.
    """
    task = build_task(config)
    check_data(config, task)
    loader = config.data.loader
    datasets = {
        name: build_split(config.registry, section, config.run.seed, loader.mode, name)
        for name, section in config.data.splits.items()
    }
    cache = open_cache(config, task, in_buckets(config, task, datasets), create=True)
    cache.store.tidy()
    cache.record_facts()
    own = Built()
    ranks = Ranks.current()
    for work in (_MediaWork(config, task, cache, own), _TextWork(config, task, cache, own)):
        _Build(work, cache, ranks, show).run()
    everyone = ranks.gather(own)
    total = Built(unreadable=sum(one.unreadable for one in everyone))
    for one in everyone:
        for part, count in one.encoded.items():
            total.encoded[part] = total.encoded.get(part, 0) + count
    return total


class _Work:
    """One kind of work: items with keys, and how they are encoded. Keys of an item that are zero are done.

    Attributes:
        keys: [N,P] of all items that the run needs, in an order that other builds share.
        size: most items of a shard.
    """

    what: str
    keys: Keys
    size: int

    def __init__(self, config: RunConfig, task: TaskModule, cache: RunCache, built: Built) -> None:
        self.config, self.task, self.cache, self.built = config, task, cache, built
        self.device = current_device()
        self._loaded: set[str] = set()

    def _encode(self, part: int, given: Any) -> list[Features]:
        """The features of a part, with its components loaded when they are first needed."""
        assert isinstance(self.task, SupportsCache)
        for name in self.cache.parts[part].components:
            if name not in self._loaded:
                component: nn.Module = self.task.get_submodule(name)
                load_frozen(component, self.device, self.config.registry)
                self._loaded.add(name)
        with torch.no_grad():
            return [on_host(row) for row in self.task.features(self.cache.parts[part].name, given)]

    def encoded(
        self, items: Iterable[tuple[str, list[int]]]
    ) -> Generator[tuple[str, int, list[_Entry]], None, None]:
        """Encodes items of chunks: yields the chunk, how many of its items, and their entries."""
        raise NotImplementedError


_Entry = tuple[Keys, Features]


class _MediaWork(_Work):
    what, size = "samples", _MEDIA

    def __init__(self, config: RunConfig, task: TaskModule, cache: RunCache, built: Built) -> None:
        super().__init__(config, task, cache, built)
        self.parts = [n for n, part in enumerate(cache.parts) if part.of == "media"]
        self.splits = [*cache.splits]
        found, items = [], []
        for number, split in enumerate(cache.splits.values()):
            table = np.asarray(split.table[:, :, self.parts])
            wanted = np.argwhere(table["high"][:, :, 0] != 0) if self.parts else np.empty((0, 2), dtype=int)
            found.append(table[tuple(wanted.T)])
            items.append(np.column_stack([np.full(len(wanted), number), wanted]))
        keys, numbers = np.concatenate(found), np.concatenate(items)
        if not self.parts:
            keys = np.empty((0, 1), keys.dtype)
        _, first = np.unique(keys[:, 0][["high", "low"]], return_index=True)  # in the order of their keys
        self.keys, self.items = keys[first], numbers[first]

    def encoded(
        self, items: Iterable[tuple[str, list[int]]]
    ) -> Generator[tuple[str, int, list[_Entry]], None, None]:
        loader = self.config.data.loader
        reading = Reading([split.rows for split in self.cache.splits.values()], self.config.run.seed)
        context = start_server([Reading.__module__]) if loader.workers else None
        batches: DataLoader[Any] = DataLoader(
            reading,
            batch_size=None,
            sampler=self._in_batches(items),
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch if loader.workers else None,
            worker_init_fn=StartWorker() if loader.workers else None,
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(0),
        )
        with starting(), starts_explained():
            iterator = iter(batches)
        with deaths_explained(iterator):
            for read in iterator:
                if isinstance(read, Fault):
                    raise read.error from WorkerTraceback(read.trace)
                yield self._of_batch(read)

    def _in_batches(self, items: Iterable[tuple[str, list[int]]]) -> Iterator[Wanted]:
        """Items of a chunk that have one size, as many as a micro-batch has."""
        most = self.config.train.micro_batch_size
        for chunk, numbers in items:
            by_size: dict[Any, list[int]] = {}
            for number in numbers:
                split, row, _ = self.items[number].tolist()
                rows = self.cache.splits[self.splits[split]].rows
                size = rows.size_of(row)
                group = by_size.setdefault((split, size), [])
                group.append(number)
            for group in by_size.values():
                for first in range(0, len(group), most):
                    own = group[first : first + most]
                    yield Wanted(chunk, own, [tuple(self.items[n].tolist()) for n in own])

    def _of_batch(self, read: Read) -> tuple[str, int, list[_Entry]]:
        entries: list[_Entry] = []
        for number, why in read.faults:
            text = torch.tensor([*why.encode()[:500]], dtype=torch.uint8)
            keys = self.keys[number].copy()
            keys["encoder"] = FAULTY
            entries += [(keys[n : n + 1], {FAULT: text}) for n in range(len(self.parts))]
            self.built.unreadable += 1
        for batch, numbers in read.batches:
            on_device = batch.to(self.device)
            places = self.cache.store.find(self.keys[numbers])
            for column, part in enumerate(self.parts):
                lacking = np.flatnonzero(places[:, column] < 0).tolist()
                if not lacking:
                    continue
                rows = self._encode(part, on_device)
                name = self.cache.parts[part].name
                self.built.encoded[name] = self.built.encoded.get(name, 0) + len(lacking)
                entries += [(self.keys[numbers[n], column : column + 1], rows[n]) for n in lacking]
        return read.chunk, len(read.faults) + sum(len(own) for _, own in read.batches), entries


class _TextWork(_Work):
    what, size = "texts", _TEXTS

    def __init__(self, config: RunConfig, task: TaskModule, cache: RunCache, built: Built) -> None:
        super().__init__(config, task, cache, built)
        self.part = cache.text_part
        texts: dict[bytes, tuple[str, int, int] | str] = {}
        if self.part is not None:
            for name, split in cache.splits.items():
                column = np.asarray(split.table[:, :, self.part])
                for row, variant in np.argwhere(column["high"] != 0).tolist():
                    texts.setdefault(column[row, variant].tobytes(), (name, row, variant))
            texts |= {key.tobytes(): text for text, key in cache.texts.items()}
        ordered = sorted(texts.items())
        keys = np.frombuffer(b"".join(key for key, _ in ordered), cache.store.keys.dtype)
        self.keys, self.texts = keys[:, None], [where for _, where in ordered]

    def _text(self, number: int) -> str:
        where = self.texts[number]
        if isinstance(where, str):
            return where
        split, row, variant = where
        return self.cache.splits[split].rows.source(row, variant).caption or ""

    def encoded(
        self, items: Iterable[tuple[str, list[int]]]
    ) -> Generator[tuple[str, int, list[_Entry]], None, None]:
        assert self.part is not None
        name = self.cache.parts[self.part].name
        for chunk, numbers in items:
            for first in range(0, len(numbers), _TEXTS_AT_ONCE):
                own = numbers[first : first + _TEXTS_AT_ONCE]
                rows = self._encode(self.part, [self._text(number) for number in own])
                self.built.encoded[name] = self.built.encoded.get(name, 0) + len(own)
                yield chunk, len(own), [(self.keys[n], row) for n, row in zip(own, rows, strict=True)]


class _Build:
    """Does one kind of work on one rank: claims chunks, encodes their items, writes a shard for each."""

    def __init__(self, work: _Work, cache: RunCache, ranks: Ranks, show: Callable[[Progress], None]) -> None:
        self.work, self.store, self.ranks, self.show = work, cache.store, ranks, show
        self.claims = Claims(cache.store.folder / "claims")
        total = len(work.keys)
        size = min(work.size, max(8, -(-total // 64)))
        self.chunks = {
            f"{work.what}-{size}-{work.keys[first, 0].tobytes()[:16].hex()}": range(
                first, min(first + size, total)
            )
            for first in range(0, total, size)
        }
        self._open: dict[str, tuple[int, list[_Entry]]] = {}
        self._began, self._shown = time.monotonic(), 0.0
        self._before = self._done()

    def run(self) -> None:
        """Works until nothing is missing, also of what other processes have claimed."""
        try:
            while waiting := self._pending():
                taken = self._take(waiting)
                first = next(taken, None)
                if first is None:
                    time.sleep(_WAIT)
                    continue
                with closing(self.work.encoded(_with_first(first, taken))) as encoded:
                    for chunk, count, entries in encoded:
                        self._collect(chunk, count, entries)
                        self._progress()
        finally:
            with suppress(CacheError):
                for chunk in [*self._open]:
                    self._write(chunk)
            self.claims.release_all()
        self._progress(last=True)

    def _pending(self) -> list[str]:
        """The chunks that lack something, in an order of this process."""
        self.store.refresh()
        lacking = self._lacking(self.work.keys)
        names = [name for name, own in self.chunks.items() if lacking[own.start : own.stop].any()]
        mixed = torch.randperm(len(names), generator=Randomness(os.getpid()).generator("chunks"))
        return [names[place] for place in mixed.tolist()]

    def _take(self, names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
        for name in names:
            if not self.claims.take(name):
                continue
            self.store.refresh()  # its last owner may have written it
            own = self.chunks[name]
            lacking = self._lacking(self.work.keys[own.start : own.stop])
            numbers = [own.start + place for place in np.flatnonzero(lacking).tolist()]
            if numbers:
                self._open[name] = (len(numbers), [])
                yield name, numbers
            else:
                self.claims.release(name)

    def _collect(self, chunk: str, count: int, entries: list[_Entry]) -> None:
        left, held = self._open[chunk]
        self._open[chunk] = (left - count, held + entries)
        self.claims.touch()
        if left == count:
            self._write(chunk)

    def _write(self, chunk: str) -> None:
        _, entries = self._open.pop(chunk)
        if entries:
            self.store.add(np.concatenate([key for key, _ in entries]), [row for _, row in entries])
        self.claims.release(chunk)

    def _lacking(self, keys: Keys) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.asarray((self.store.find(keys) < 0).any(1))

    def _done(self) -> int:
        return int((~self._lacking(self.work.keys)).sum())

    def _progress(self, last: bool = False) -> None:
        if self.ranks.rank or not (last or time.monotonic() - self._shown > _EVERY):
            return
        self._shown = time.monotonic()
        self.store.refresh()
        done, total = self._done(), len(self.work.keys)
        new, took = done - self._before, self._shown - self._began
        self.show(Progress(self.work.what, done, total, took / new * (total - done) if new else None))


def _with_first(
    first: tuple[str, list[int]], others: Iterator[tuple[str, list[int]]]
) -> Iterator[tuple[str, list[int]]]:
    yield first
    yield from others
