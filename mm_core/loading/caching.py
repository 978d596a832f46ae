"""`mm cache build`: encodes what a run's feature cache lacks, on any number of ranks and hosts."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, CountingTokenizer, Features, Randomness, SupportsCache, TaskModule
from mm_core.data.cache.claims import Claims
from mm_core.data.cache.hashes import FileHashes
from mm_core.data.cache.reading import Read, Reading, Wanted
from mm_core.data.cache.rows import PartKey, keys_of_texts
from mm_core.data.cache.samples import FAULT, on_host
from mm_core.data.cache.shards import FAULTY, SHARD_BYTES, Keys, finite, size_of
from mm_core.data.cache.store import Store, reduced
from mm_core.data.loading.cut_captions import CutCaptions
from mm_core.data.loading.loader import faults_raised
from mm_core.data.loading.workers import StartWorker, read_by_workers, read_on, start_server
from mm_core.data.media.limits import DecodeLimit
from mm_core.device import current_device, set_numerics
from mm_core.errors import CacheError, DataError
from mm_core.files import remove_stale_stages
from mm_core.loading.frozen import load_frozen
from mm_core.plan import RunCache, cache_of
from mm_core.plan.settings import check_schedule
from mm_core.runtime.ranks import Ranks

_MEDIA, _TEXTS = 128, 1024
"""Most samples, and most texts, of a shard."""

_TEXTS_AT_ONCE = 16
_EVERY = 5.0  # seconds between two lines of progress
_WAIT = 1.0


class Progress(NamedTuple):
    """How far a build of a cache is, over all ranks.

    Attributes:
        what: `samples` or `texts`; `entries` that are checked first.
        done: of `of`, with those that were there before.
        seconds: left, as far as this can be known.
        each: bytes of one that this process has encoded, on average; 0: it has encoded none.
    """

    what: str
    done: int
    of: int
    seconds: float | None
    each: int = 0


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

    Raises:
        MMError: the learning-rate schedule refuses the run's steps, or as for `open_cache`.
    """
    check_schedule(config, config.train.steps or 0)  # the run would refuse it after everything is encoded
    set_numerics(config.run.deterministic, config.run.float32_matmul)
    task, cache = cache_of(config, create=True)
    remove_stale_stages(cache.store.folder / "shards", ".*.tmp-*", patience=24 * 3600.0)
    cache.record_facts()
    own, ranks = Built(), Ranks.current()
    shown = show if ranks.rank == 0 else None
    _repair(cache.store, ranks, own, shown)
    for of_text in sorted({part.of_text for part in cache.parts}):
        _Build(config, task, cache, own, of_text, shown).run()
    total = Built(cut=own.cut.of_ranks(True))
    for one in ranks.gather(own):
        total.encoded += one.encoded
        total.unreadable += one.unreadable
        total.removed += one.removed
        total.summed += one.summed
        total.left_out |= one.left_out
    media = {split: keys for split, part, keys in cache.tables() if not part.of_text}
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
                    reduced(shard, ~np.isin(np.arange(len(shard.keys)), [*faults]))
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


@dataclass
class _Build:
    """Encodes samples or texts on one rank: claims chunks, encodes their items, writes shards of them.

    Items are what the run needs, in the order of their keys, which other builds share.
    """

    config: RunConfig
    task: TaskModule
    cache: RunCache
    built: Built
    of_text: bool
    show: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        cache, of_text = self.cache, self.of_text
        self.what, self.device = "texts" if of_text else "samples", current_device()
        self.parts = [part for part in cache.parts if part.of_text == of_text]
        self.store, self.claims = cache.store, Claims(cache.store.folder / "claims")
        self.splits = [split.rows for split in cache.splits.values()]
        columns = [number for number, part in enumerate(cache.parts) if part in self.parts]
        tables = [split.keys[:, :, columns] for split in cache.splits.values()]
        if of_text and cache.texts:
            tables.append(np.stack([*cache.texts.values()])[:, :, None])
        wanted = [np.argwhere(table["high"][:, :, 0] != 0) for table in tables]
        keys = np.concatenate([table[tuple(own.T)] for table, own in zip(tables, wanted, strict=True)])
        items = np.concatenate([np.insert(own, 0, number, 1) for number, own in enumerate(wanted)])
        _, first = np.unique(keys[:, 0][["high", "low"]], return_index=True)
        self.keys, self.items, total = keys[first], items[first], len(first)
        size = min(_TEXTS if of_text else _MEDIA, max(8, -(-total // 64)))
        chunks = [range(first, min(first + size, total)) for first in range(0, total, size)]
        names = (self.keys[own.start, 0].tobytes()[:16].hex() for own in chunks)
        self.chunks = {f"{self.what}-{size}-{name}": own for name, own in zip(names, chunks, strict=True)}
        self._entries: list[_Entry] = []
        self._loaded: set[str] = set()
        self._each = 0
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
                    for chunk, reads in groupby(found, lambda each: each.chunk):
                        for each in reads:
                            self._encode(each)
                            self._progress()
                        self._write()
                        self.claims.release(chunk)
        finally:
            with suppress(CacheError):
                self._write()
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
                yield name, numbers
            else:
                self.claims.release(name)

    def _done(self) -> int:
        return int((self.store.find(self.keys) >= 0).all(1).sum())

    def _lacking(self, own: range) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which items are to be encoded."""
        left_out = np.array([(self.what, number) in self.built.left_out for number in own], bool)
        return np.asarray((self.store.find(self.keys[own.start : own.stop]) < 0).any(1) & ~left_out)

    def _texts(self, chunks: Iterable[_Chunk]) -> Generator[Read, None, None]:
        beside = [*self.cache.texts]
        tokenizer = getattr(self.task.batch_transform(), "tokenizer", None)
        for chunk, numbers in chunks:
            for first in range(0, len(numbers), _TEXTS_AT_ONCE):
                texts, own, faults = list[str](), list[int](), []
                for number in numbers[first : first + _TEXTS_AT_ONCE]:
                    split, row, variant = self.items[number].tolist()
                    try:
                        rows = None if split == len(self.splits) else self.splits[split]
                        texts.append(beside[row] if rows is None else rows.source(row, variant).caption or "")
                        own.append(number)
                    except DataError as error:
                        faults.append((number, error.what, True))
                if isinstance(tokenizer, CountingTokenizer):
                    self.built.cut.count(tokenizer, texts)
                yield Read(chunk, [(texts, own)], faults)

    def _media(self, chunks: Iterable[_Chunk]) -> Generator[Read, None, None]:
        loader, asked = self.config.data.loader, _Asked(self._in_batches(chunks))
        limit = DecodeLimit(self.config.data.decode_seconds)
        batches: DataLoader[Any] = DataLoader(
            Reading(self.splits, self.config.run.seed),
            batch_size=None,
            sampler=asked,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch if loader.workers else None,
            # The server starts first: it may move the folder in which workers register.
            multiprocessing_context=start_server([Reading.__module__]) if loader.workers else None,
            worker_init_fn=StartWorker(limit) if loader.workers else None,
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
            by_size: dict[Any, list[tuple[int, int, int]]] = {}
            for number in numbers:
                split, row, variant = self.items[number].tolist()
                alike = split, self.splits[split].size_of(row)
                by_size.setdefault(alike, []).append((number, row, variant))
            for (split, _), group in by_size.items():
                for first in range(0, len(group), most):
                    yield Wanted(chunk, split, group[first : first + most])

    def _encode(self, read: Read) -> None:
        """Encodes what was read, and writes a shard when there is enough."""
        entries = self._entries
        for number, why, may_pass in read.faults:
            unread = FileHashes(self.store.folder / "none")  # it knows no file, so that all are read again
            if may_pass or not self._unchanged([number], None, unread)[0]:
                self.built.left_out[self.what, number] = why
                continue
            keys = self.keys[number].copy()
            keys["encoder"] = FAULTY
            reason = torch.tensor([*why.encode()[:500]], dtype=torch.uint8)
            entries += [(keys[n : n + 1], {FAULT: reason}) for n in range(len(self.parts))]
            self.built.unreadable += 1
        for given, numbers in read.batches:
            same = self._unchanged(numbers, given, self.store.hashes)
            changed = [(self.what, number) for number, kept in zip(numbers, same, strict=True) if not kept]
            self.built.left_out |= dict.fromkeys(changed, "its file or caption was changed")
            lacking = same[:, None] & (self.store.find(self.keys[numbers]) < 0)
            given = given if self.of_text or not lacking.any() else cast(Batch, given).to(self.device)
            for column in np.flatnonzero(lacking.any(0)).tolist():
                part = self.parts[column]
                rows = self._features(part, given)
                for n in np.flatnonzero(lacking[:, column]).tolist():
                    if not finite(rows[n]):
                        split, row, variant = self.items[numbers[n]].tolist()
                        name = self.cache.name([*self.cache.splits, "texts"][split], row, variant)
                        why = f"the {part.name} of {name} are not finite"
                        self.built.left_out[self.what, numbers[n]] = why
                        continue
                    self.built.encoded[part.name] += 1
                    entries.append((self.keys[numbers[n], column : column + 1], rows[n]))
        self.claims.touch()
        size = sum(size_of(row) for _, row in entries)
        self._each = size * len(self.parts) // len(entries) if entries else self._each
        if size >= SHARD_BYTES:
            self._write()

    def _unchanged(
        self, numbers: Sequence[int], given: Batch | list[str] | None, hashes: FileHashes
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which items still have the keys that they had at the start; what is encoded else is not theirs."""
        if isinstance(given, list):
            found = keys_of_texts(self.parts[0], given)[:, None]
        else:
            split = self.splits[self.items[numbers[0], 0]]  # a batch has rows of one split
            rows = [(row, variant) for _, row, variant in self.items[numbers].tolist()]
            found = split.keys(rows, self.parts, hashes)
        return np.asarray((found == self.keys[numbers]).all(1))

    def _features(self, part: PartKey, given: Batch | list[str]) -> list[Features]:
        """The features of a part, with its components loaded when they are first needed."""
        assert isinstance(self.task, SupportsCache)
        for name in part.components:
            if name not in self._loaded:
                load_frozen(self.task.get_submodule(name), self.device, self.config.registry)
                self._loaded.add(name)
        with torch.no_grad():
            return [on_host(row) for row in self.task.features(part.name, given)]

    def _write(self) -> None:
        """Writes what is encoded of a chunk."""
        entries, self._entries = self._entries, []
        if entries:
            self.store.add(np.concatenate([key for key, _ in entries]), [row for _, row in entries])

    def _progress(self, last: bool = False) -> None:
        if self.show is None or not (last or time.monotonic() - self._shown > _EVERY):
            return
        self._shown = time.monotonic()
        self.store.refresh()
        total, done = len(self.keys), self._done()
        new, took = done - self._before, self._shown - self._began
        left = took / new * (total - done) if new else None
        self.show(Progress(self.what, done, total, left, self._each))
