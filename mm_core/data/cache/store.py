"""The store of the feature cache: entries by key, in shards that any number of processes add to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mm_core.contracts import Features
from mm_core.data.cache.hashes import FILES, FileHashes, Lookup
from mm_core.data.cache.shards import FAULTY, KEY, Keys, Shard, mapped, open_shard, remove_shard, write_shard
from mm_core.errors import CacheError
from mm_core.files import os_reason, read_plain, replace_text

_MOST_OPEN = 512
"""Shards whose memory mapping a process keeps."""

_PATIENCE = 10.0  # seconds between two looks for entries that other processes have added

_THREADS = 4  # that read shards to check them

_FORMAT = "mm_core feature cache, format 1\n"


class Store:
    """The entries of a feature cache. Processes find what others have added after `refresh`.

    Args:
        folder: of the cache.
        create: whether it may be made, for one that is written.

    Raises:
        CacheError: there is none, it has another format, or a shard is damaged.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        self.shards: list[Shard] = []
        """The shards that this process knows."""
        self._names: set[str] | None = None
        self._looked = 0.0
        self._mapped = lru_cache(_MOST_OPEN)(mapped)
        self._check_format(create)
        self.refresh()

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.folder,)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> Keys:
        """The keys of all entries: the place of one is its number here."""
        return self._lookup.keys

    @cached_property
    def hashes(self) -> FileHashes:
        """The hashes of files that the cache remembers, as they are when they are first needed."""
        return FileHashes(self.folder / FILES)

    def _check_format(self, create: bool) -> None:
        about = self.folder / "format.txt"
        try:
            if create:
                new = not about.exists()
                # Object stores keep no empty folders; a read-only cache can be read without them.
                with nullcontext() if new else suppress(OSError):
                    for name in ("shards", "facts", "claims"):
                        (self.folder / name).mkdir(parents=True, exist_ok=True)
                if new:
                    replace_text(about, _FORMAT)
            found = read_plain(about)[:200].decode(errors="replace")
        except FileNotFoundError:
            hint = "run `mm cache build --config ...` first, or check data.cache.dir"
            raise CacheError("there is no feature cache", where=str(self.folder), hint=hint) from None
        except OSError as error:
            what = f"the cache cannot be opened: {os_reason(error)}"
            raise CacheError(what, where=str(self.folder)) from None
        if found != _FORMAT:
            raise CacheError(
                f"the cache has another format: {found.strip()[:60]!r}",
                where=str(about),
                accepted=_FORMAT.strip(),
                hint="use another folder, or the version of mm_core that wrote it",
            )

    def refresh(self) -> bool:
        """Opens the shards that were added, and forgets those that are gone; whether anything has changed."""
        known = {shard.path.name: shard for shard in self.shards}
        names = {path.name for path in (self.folder / "shards").glob("*.safetensors")}
        if names == self._names:
            return False
        shards = [shard for name, shard in known.items() if name in names]
        for name in sorted(names - known.keys()):
            with suppress(FileNotFoundError):  # another process has removed it since
                shards.append(open_shard(self.folder / "shards" / name))
        self.shards, self._names = shards, names
        self._starts = np.cumsum([0, *(len(shard.keys) for shard in shards)])
        keys: Keys = np.concatenate([np.empty(0, KEY), *(shard.keys for shard in shards)])
        self._lookup = Lookup(keys, keys["encoder"] == FAULTY)
        if known.keys() - names:
            self._mapped.cache_clear()
        return True

    def find(self, keys: Keys) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The place of each key's entry, int64 of the keys' shape; -1 where there is none."""
        return self._lookup.find(keys)

    def get(self, keys: Keys) -> list[Features | None]:
        """The features of keys [N], in memory that is mapped from files; None where there are none.

        It looks for what other processes have added; what they move, as `keep` does, is found again.
        """
        for _ in range(3):
            places = self.find(keys)
            lacking = bool(((places < 0) & (keys["high"] != 0)).any())
            if lacking and time.monotonic() - self._looked > _PATIENCE:
                self._looked = time.monotonic()
                self.refresh()
                places = self.find(keys)
            with suppress(FileNotFoundError):
                return [None if place < 0 else self.read(place) for place in places.tolist()]
            self.refresh()
        return [None] * len(keys)

    def read(self, place: int) -> Features:
        """The features of the entry at a place.

        Raises:
            FileNotFoundError: another process has removed its shard.
            CacheError: the entry is damaged, or not finite.
        """
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        shard = self.shards[number]
        return shard.entry(self._mapped(shard.path), place - int(self._starts[number]))

    def add(self, keys: Keys, entries: Sequence[Mapping[str, Tensor]]) -> None:
        """Writes entries as a shard of their own; `refresh` finds them."""
        write_shard(self.folder / "shards", keys, entries)

    def keep(self, needed: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
        """Removes the entries that are not needed; returns the bytes that this frees.

        Args:
            needed: bool of each place.

        Raises:
            CacheError: the cache cannot be written, or a shard is damaged.
        """
        each = zip(self.shards, np.split(needed, self._starts[1:-1]), strict=False)  # one empty part of none
        freed = sum(reduced(shard, own) for shard, own in each if not own.all())
        self.refresh()
        return freed

    def checked(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, dict[int, str]]]:
        """Reads all entries of shards: why those that cannot be used cannot, by their place in the shard.

        Raises:
            CacheError: a shard cannot be read.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from zip(shards, pool.map(Shard.faults, shards), strict=True)

    def faults(self) -> dict[int, str]:
        """Reads all entries: why those that cannot be used cannot, by place; see `checked`."""
        checked = zip(self._starts.tolist(), self.checked(self.shards), strict=False)
        return {start + place: why for start, (_, faults) in checked for place, why in faults.items()}


def reduced(shard: Shard, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """Replaces a shard by one of the entries that are kept, with checksums, or by none; see `Store.refresh`.

    After a kill both are there, with the same entries.

    Args:
        shard: of the cache; another process may have removed it.
        kept: bool of each of its entries.

    Returns:
        The bytes that this frees.

    Raises:
        CacheError: the cache cannot be written, or a kept entry is damaged.
    """
    with suppress(FileNotFoundError):
        freed, places = shard.path.stat().st_size, np.flatnonzero(kept)
        if len(places):
            data = mapped(shard.path)
            entries = [shard.entry(data, place) for place in places.tolist()]
            freed -= write_shard(shard.path.parent, shard.keys[places], entries).stat().st_size
        remove_shard(shard.path)
        return freed
    return 0
