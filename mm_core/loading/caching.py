"""`mm cache build`: encodes what a run's feature cache lacks, on any number of ranks and hosts."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, CountingTokenizer, Features, Randomness, SupportsCache, TaskModule
from mm_core.data.cache.claims import Claims
from mm_core.data.cache.reading import Read, Reading, Wanted
from mm_core.data.cache.rows import keys_of_texts
from mm_core.data.cache.samples import FAULT, on_host
from mm_core.data.cache.shards import FAULTY, SHARD_BYTES, Keys, finite, size_of
from mm_core.data.cache.store import Store
from mm_core.data.loading.cut_captions import CutCaptions
from mm_core.data.loading.loader import faults_raised
from mm_core.data.loading.workers import StartWorker, read_by_workers, read_on, start_server
from mm_core.data.media.limits import DecodeLimit
from mm_core.device import current_device, set_numerics
from mm_core.errors import CacheError, DataError
from mm_core.loading.frozen import load_frozen
from mm_core.plan import RunCache, cache_of
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
        what: `samples` or `texts`; `entries` that are checked first.
        done: of `of`, with those that were there before.
        seconds: left, as far as this can be known.
    """

    what: str
    done: int
    of: int
    seconds: float | None


@dataclass
class Built:
    """What one rank has encoded, by part; the samples that cannot be read, and why others were left out; how
    many entries it has removed since they were damaged or not finite, and how many it has given checksums;
    which of the captions that it has encoded were cut."""

    encoded: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    removed: int = 0
    summed: int = 0
    left_out: dict[tuple[str, int], str] = field(default_factory=dict)
    cut: CutCaptions = field(default_factory=CutCaptions)


def build_cache(config: RunConfig, show: Callable[[Progress], None]) -> Built:
    """Encodes everything that a run's cache lacks; called by each rank, in a process group.

    Any number of builds may fill one cache at a time. One that was stopped goes on where it was.

    Args:
        config: of the run.
        show: receives the progress.

    Returns:
        What all ranks have encoded.
    """
    set_numerics(config.run.deterministic, config.run.float32_matmul)
    task, cache = cache_of(config, create=True)
    cache.store.tidy()
    cache.record_facts()
    own, ranks = Built(), Ranks.current()
    shown = show if ranks.rank == 0 else None
    _repair(cache.store, ranks, own, shown)
    for of in ("media", "text"):
        if any(part.of == of for part in cache.parts):
            _Build(config, task, cache, own, of, shown).run()
    total = Built()
    for one in ranks.gather(own):
        total.encoded += one.encoded
        total.unreadable += one.unreadable
        total.removed += one.removed
        total.summed += one.summed
        total.left_out |= one.left_out
    total.cut = own.cut.of_ranks(True)
    media = {split: keys for split, part, keys in cache.tables() if not cache.keyed[part].of_text}
    total.unreadable += sum(cache.without_keys(split, keys) for split, keys in media.items())
    return total


def _repair(store: Store, ranks: Ranks, built: Built, show: Callable[[Progress], None] | None) -> None:
    """Removes a rank's share of the entries that cannot be used, and gives those of before checksums."""
    claims, began, done = Claims(store.folder / "claims"), time.monotonic(), 0
    own, shown = store.shards[ranks.rank :: ranks.count], began
    total = sum(len(shard.keys) for shard in own)
    for shard, faults in store.checked(own):
        before = shard.sums is None
        if (faults or before) and claims.take(shard.path.stem):
            try:
                if shard.path.exists():  # else another build has replaced it
                    store.repair(shard, faults)
                    built.removed += len(faults)
                    built.summed += (len(shard.keys) - len(faults)) * before
            finally:
                claims.release_all()
        done += len(shard.keys)
        if show is not None and (now := time.monotonic()) - shown > _EVERY:
            shown = now
            show(Progress("entries", done, total, (now - began) / done * (total - done)))
    store.refresh()


_Entry = tuple[Keys, Features]
_Chunk = tuple[str, list[int]]


class _Asked:
    """What workers are to read, in order; what has not come when they end is asked of the next ones again."""

    def __init__(self, wanted: Iterator[Wanted]) -> None:
        self._rest, self._waiting = wanted, deque[Wanted]()

    def __iter__(self) -> Iterator[Wanted]:
        yield from [*self._waiting]
        for one in self._rest:
            self._waiting.append(one)
            yield one

    def came(self) -> None:
        self._waiting.popleft()


class _Build:
    """Encodes samples or texts on one rank: claims chunks, encodes their items, writes shards of them.

    Items are what the run needs, in the order of their keys, which other builds share.
    """

    def __init__(
        self,
        config: RunConfig,
        task: TaskModule,
        cache: RunCache,
        built: Built,
        of: Literal["media", "text"],
        show: Callable[[Progress], None] | None,
    ) -> None:
        self.config, self.task, self.cache, self.built, self.show = config, task, cache, built, show
        self.what, self.of_text = ("texts", True) if of == "text" else ("samples", False)
        self.parts = [number for number, part in enumerate(cache.parts) if part.of == of]
        self.store, self.device = cache.store, current_device()
        self.claims = Claims(cache.store.folder / "claims")
        self.splits = [split.rows for split in cache.splits.values()]
        tables = [split.table[:, :, self.parts] for split in cache.splits.values()]
        if self.of_text:
            tables.append(np.stack([*cache.texts.values()])[:, :, None] if cache.texts else tables[0][:0])
        wanted = [np.argwhere(table["high"][:, :, 0] != 0) for table in tables]
        keys = np.concatenate([table[tuple(own.T)] for table, own in zip(tables, wanted, strict=True)])
        items = np.concatenate([np.insert(own, 0, number, 1) for number, own in enumerate(wanted)])
        _, first = np.unique(keys[:, 0][["high", "low"]], return_index=True)
        self.keys, self.items, total = keys[first], items[first], len(first)
        self.left_out = np.zeros(total, bool)
        size = min(_TEXTS if self.of_text else _MEDIA, max(8, -(-total // 64)))
        self.chunks = {
            f"{self.what}-{size}-{self.keys[first, 0].tobytes()[:16].hex()}": range(
                first, min(first + size, total)
            )
            for first in range(0, total, size)
        }
        self._open: dict[str, tuple[int, list[_Entry]]] = {}
        self._loaded: set[str] = set()
        self._began, self._shown = time.monotonic(), 0.0
        self._before = self._done()

    def run(self) -> None:
        """Works until nothing is missing, also of what other processes have claimed."""
        read = self._texts if self.of_text else self._media
        try:
            while waiting := self._pending():
                taken = self._take(waiting)
                first = next(taken, None)
                if first is None:
                    time.sleep(_WAIT)
                    continue
                with closing(read(chain([first], taken))) as found:
                    for each in found:
                        self._encode(each)
                        self._progress()
        finally:
            with suppress(CacheError):
                for chunk in [*self._open]:
                    self._write(chunk)
            self.claims.release_all()
        self.claims.sweep()
        self._progress(last=True)

    def _pending(self) -> list[str]:
        """The chunks that lack something, in an order of this process."""
        self.store.refresh()
        lacking = self._lacking(range(len(self.keys)))
        names = [name for name, own in self.chunks.items() if lacking[own.start : own.stop].any()]
        mixed = torch.randperm(len(names), generator=Randomness(os.getpid()).generator("chunks"))
        return [names[place] for place in mixed.tolist()]

    def _take(self, names: Sequence[str]) -> Iterator[_Chunk]:
        for name in names:
            if not self.claims.take(name):
                continue
            self.store.refresh()  # its last owner may have written it
            own = self.chunks[name]
            numbers = (own.start + np.flatnonzero(self._lacking(own))).tolist()
            if numbers:
                self._open[name] = (len(numbers), [])
                yield name, numbers
            else:
                self.claims.release(name)

    def _done(self) -> int:
        return int((self.store.find(self.keys) >= 0).all(1).sum())

    def _lacking(self, own: range) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which items are to be encoded."""
        lacking = (self.store.find(self.keys[own.start : own.stop]) < 0).any(1)
        return np.asarray(lacking & ~self.left_out[own.start : own.stop])

    def _texts(self, chunks: Iterable[_Chunk]) -> Generator[Read, None, None]:
        beside = [*self.cache.texts]
        tokenizer = getattr(self.task.batch_transform(), "tokenizer", None)
        for chunk, numbers in chunks:
            for first in range(0, len(numbers), _TEXTS_AT_ONCE):
                own = numbers[first : first + _TEXTS_AT_ONCE]
                texts, faults = [], []
                for number in own:
                    split, row, variant = self.items[number].tolist()
                    try:
                        rows = None if split == len(self.splits) else self.splits[split]
                        texts.append(beside[row] if rows is None else rows.source(row, variant).caption or "")
                    except DataError as error:
                        faults.append((number, error.what, True))
                if isinstance(tokenizer, CountingTokenizer):
                    self.built.cut.count(tokenizer, texts)
                bad = {number for number, *_ in faults}
                yield Read(chunk, [(texts, [number for number in own if number not in bad])], faults)

    def _media(self, chunks: Iterable[_Chunk]) -> Generator[Read, None, None]:
        loader, asked = self.config.data.loader, _Asked(self._in_batches(chunks))
        context = start_server([Reading.__module__]) if loader.workers else None
        limit = DecodeLimit(self.config.data.decode_seconds)
        batches: DataLoader[Any] = DataLoader(
            Reading(self.splits, self.config.run.seed),
            batch_size=None,
            sampler=asked,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch if loader.workers else None,
            worker_init_fn=StartWorker(limit) if loader.workers else None,
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(0),
        )

        def start(_: int) -> Iterator[Read]:
            return read_by_workers(batches, self.splits)

        for read in faults_raised(read_on(start(0), start)):
            asked.came()
            yield read

    def _in_batches(self, chunks: Iterable[_Chunk]) -> Iterator[Wanted]:
        """Items of a chunk that have one size, as many as a micro-batch has."""
        most = self.config.train.micro_batch_size
        for chunk, numbers in chunks:
            by_size: dict[Any, list[int]] = {}
            for number in numbers:
                split, row, _ = self.items[number].tolist()
                by_size.setdefault((split, self.splits[split].size_of(row)), []).append(number)
            for group in by_size.values():
                for first in range(0, len(group), most):
                    own = group[first : first + most]
                    yield Wanted(chunk, own, [tuple(self.items[n].tolist()) for n in own])

    def _encode(self, read: Read) -> None:
        """Encodes what was read, and writes a shard when there is enough."""
        entries: list[_Entry] = []
        for number, why, may_pass in read.faults:
            if may_pass or not self._unchanged([number], None, fresh=True)[0]:
                self._leave_out(number, why)
                continue
            keys = self.keys[number].copy()
            keys["encoder"] = FAULTY
            reason = torch.tensor([*why.encode()[:500]], dtype=torch.uint8)
            entries += [(keys[n : n + 1], {FAULT: reason}) for n in range(len(self.parts))]
            self.built.unreadable += 1
        for given, all_numbers in read.batches:
            same = self._unchanged(all_numbers, given)
            numbers = np.asarray(all_numbers, int)
            for number in numbers[~same].tolist():
                self._leave_out(number, "its file or caption was changed")
            lacking = same[:, None] & (self.store.find(self.keys[numbers]) < 0)
            given = given if self.of_text or not lacking.any() else cast(Batch, given).to(self.device)
            for column in np.flatnonzero(lacking.any(0)).tolist():
                number = self.parts[column]
                rows, part = self._features(number, given), self.cache.parts[number].name
                for n in np.flatnonzero(lacking[:, column]).tolist():
                    if not finite(rows[n]):
                        why = f"the {part} of {self._name(numbers[n])} are not finite"
                        self._leave_out(int(numbers[n]), why)
                        continue
                    self.built.encoded[part] += 1
                    entries.append((self.keys[numbers[n], column : column + 1], rows[n]))
        left, held = self._open[read.chunk]
        left -= len(read.faults) + sum(len(own) for _, own in read.batches)
        self._open[read.chunk] = (left, held := held + entries)
        self.claims.touch()
        if not left or sum(size_of(row) for _, row in held) >= SHARD_BYTES:
            self._write(read.chunk)

    def _name(self, number: int) -> str:
        split, row, variant = self.items[number].tolist()
        return self.cache.name([*self.cache.splits, "texts"][split], row, variant)

    def _leave_out(self, number: int, why: str) -> None:
        self.left_out[number] = True
        self.built.left_out[self.what, number] = why

    def _unchanged(
        self, numbers: Sequence[int], given: Batch | list[str] | None, fresh: bool = False
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which items still have the keys that they had at the start; what is encoded else is not theirs."""
        keyed = self.cache.keyed
        found = np.empty((len(numbers), len(self.parts)), self.keys.dtype)
        if isinstance(given, list):
            found = keys_of_texts(keyed[self.parts[0]], given)[:, None]
        for number, split in enumerate(self.splits if not self.of_text else ()):
            places = [n for n, item in enumerate(numbers) if self.items[item, 0] == number]
            rows = [tuple(self.items[numbers[n], 1:].tolist()) for n in places]
            found[places] = split.keys(rows, keyed, self.cache.hashes, fresh)[:, self.parts]
        return np.asarray((found == self.keys[numbers]).all(1))

    def _features(self, part: int, given: Batch | list[str]) -> list[Features]:
        """The features of a part, with its components loaded when they are first needed."""
        assert isinstance(self.task, SupportsCache)
        for name in self.cache.parts[part].components:
            if name not in self._loaded:
                component: nn.Module = self.task.get_submodule(name)
                load_frozen(component, self.device, self.config.registry)
                self._loaded.add(name)
        with torch.no_grad():
            return [on_host(row) for row in self.task.features(self.cache.parts[part].name, given)]

    def _write(self, chunk: str) -> None:
        """Writes what is encoded of a chunk; one that is done is released."""
        left, entries = self._open[chunk]
        if entries:
            self.store.add(np.concatenate([key for key, _ in entries]), [row for _, row in entries])
        self._open[chunk] = (left, [])
        if not left:
            del self._open[chunk]
            self.claims.release(chunk)

    def _progress(self, last: bool = False) -> None:
        if self.show is None or not (last or time.monotonic() - self._shown > _EVERY):
            return
        self._shown = time.monotonic()
        self.store.refresh()
        total, done = len(self.keys), self._done()
        new, took = done - self._before, self._shown - self._began
        self.show(Progress(self.what, done, total, took / new * (total - done) if new else None))
