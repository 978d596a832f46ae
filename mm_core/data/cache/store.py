"""The store of the feature cache: entries by key, in shards that any number of processes add to."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mm_core.contracts import Features
from mm_core.data.cache.shards import FAULTY, KEY, Keys, Shard, open_shard, remove_shard, write_shard
from mm_core.errors import CacheError
from mm_core.files import os_reason, read_plain, remove_stale_stages, replace_text

_MOST_OPEN = 512
"""Shards whose memory mapping a process keeps."""

_ABANDONED = 24 * 3600.0

_PATIENCE = 10.0  # seconds between two looks for entries that other processes have added

_THREADS = 4  # that read shards to check them

_FORMAT = "mm_core feature cache, format 1\n"

Places = np.ndarray[Any, np.dtype[np.int64]]


class Lookup:
    """Finds keys of 128 bits among others by binary search.

    Args:
        keys: structured array [N] with `high` and `low`.
        last: bool [N], those that are found only where no other has the same key.
    """

    def __init__(self, keys: Keys, last: np.ndarray[Any, np.dtype[np.bool_]] | None = None) -> None:
        self._low = keys["low"]
        self._order = np.argsort(keys["high"], kind="stable")
        if last is not None and last.any():
            first = np.argsort(last, kind="stable")
            self._order = first[np.argsort(keys["high"][first], kind="stable")]
        self._high = keys["high"][self._order]

    def find(self, keys: Keys) -> Places:
        """The place of each key, int64 of the keys' shape; -1 where it is not among the others."""
        flat = np.ascontiguousarray(keys).reshape(-1)
        found = np.full(len(flat), -1, dtype=np.int64)
        left = np.searchsorted(self._high, flat["high"])
        for _ in range(8):  # entries written twice, and 64 bits that are equal by chance
            there = np.flatnonzero((found < 0) & (left < len(self._high)))
            there = there[self._high[left[there]] == flat["high"][there]]
            if not len(there):
                break
            places = self._order[left[there]]
            same = self._low[places] == flat["low"][there]
            found[there[same]] = places[same]
            left[there] += 1
        return found.reshape(keys.shape)


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
        self._shards: dict[str, Shard] = {}
        self._list: list[Shard] = []
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._ready, self._looked = False, 0.0
        self._check_format(create)
        self.refresh()

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.folder,)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards that this process knows."""
        return self._list

    def _check_format(self, create: bool) -> None:
        about = self.folder / "format.txt"
        try:
            if create and not about.exists():
                self._make_folders()
                replace_text(about, _FORMAT)
            elif create:  # object stores keep no empty folders; a read-only cache can be read without them
                with suppress(OSError):
                    self._make_folders()
            found = read_plain(about)[:200].decode(errors="replace")
        except FileNotFoundError:
            raise CacheError(
                "there is no feature cache",
                where=str(self.folder),
                hint="run `mm cache build --config ...` first, or check data.cache.dir",
            ) from None
        except OSError as error:
            raise CacheError(
                f"the cache cannot be opened: {os_reason(error)}", where=str(self.folder)
            ) from None
        if found != _FORMAT:
            raise CacheError(
                f"the cache has another format: {found.strip()[:60]!r}",
                where=str(about),
                accepted=_FORMAT.strip(),
                hint="use another folder, or the version of mm_core that wrote it",
            )

    def _make_folders(self) -> None:
        for name in ("shards", "facts", "claims"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def refresh(self) -> bool:
        """Opens the shards that were added, and forgets those that are gone; whether anything has changed."""
        names = {path.name for path in (self.folder / "shards").glob("*.safetensors")}
        if names == self._shards.keys() and self._ready:
            return False
        self._ready = True
        kept = {name: shard for name, shard in self._shards.items() if name in names}
        for name in sorted(names - kept.keys()):
            with suppress(FileNotFoundError):  # another process has removed it since
                kept[name] = open_shard(self.folder / "shards" / name)
        self._shards = kept
        self._list = [*self._shards.values()]
        self._ends = np.cumsum([len(shard.keys) for shard in self._list], dtype=np.int64)
        self.keys: Keys = np.concatenate([np.empty(0, KEY), *(shard.keys for shard in self._list)])
        self._lookup = Lookup(self.keys, self.keys["encoder"] == FAULTY)
        for name in self._open.keys() - self._shards.keys():
            del self._open[name]
        return True

    def find(self, keys: Keys) -> Places:
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
                if self.refresh():
                    places = self.find(keys)
            try:
                return [None if place < 0 else self.read(place) for place in places.tolist()]
            except FileNotFoundError:
                self.refresh()
        return [None] * len(keys)

    def read(self, place: int) -> Features:
        """The features of the entry at a place.

        Raises:
            FileNotFoundError: another process has removed its shard.
            CacheError: the entry is damaged, or not finite.
        """
        number = int(np.searchsorted(self._ends, place, side="right"))
        shard = self._list[number]
        data = self._open.get(shard.path.name)
        if data is None:
            data = self._open[shard.path.name] = shard.mapped()
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(shard.path.name)
        return shard.entry(data, place - (int(self._ends[number - 1]) if number else 0))

    def add(self, keys: Keys, entries: Sequence[Mapping[str, Tensor]]) -> None:
        """Writes entries as a shard of their own; `refresh` finds them."""
        if len(keys):
            write_shard(self.folder / "shards", keys, entries)

    def keep(self, needed: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
        """Removes the entries that are not needed; returns the bytes that this frees.

        Args:
            needed: bool of each place.

        Raises:
            CacheError: the cache cannot be written, or a shard is damaged.
        """
        freed, first = 0, 0
        for shard, end in zip(self._list, self._ends.tolist(), strict=True):
            own, first = needed[first:end], end
            if own.all():
                continue
            with suppress(FileNotFoundError):  # another process has removed it
                freed += shard.path.stat().st_size - _reduce(shard, own)
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
        starts = [0, *self._ends.tolist()]
        checked = zip(starts, self.checked(self._list), strict=False)
        return {start + place: why for start, (_, faults) in checked for place, why in faults.items()}

    def repair(self, shard: Shard, faults: Mapping[int, str]) -> None:
        """Removes a shard's entries that cannot be used, and gives the others checksums; see `refresh`.

        Raises:
            CacheError: the cache cannot be written.
        """
        usable = np.ones(len(shard.keys), bool)
        usable[[*faults]] = False
        with suppress(FileNotFoundError):  # another process has removed it
            _reduce(shard, usable)

    def tidy(self) -> None:
        """Removes what killed processes were writing."""
        remove_stale_stages(self.folder / "shards", ".*.tmp-*", patience=_ABANDONED)


def _reduce(shard: Shard, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """Replaces a shard by one of the entries that are kept, or by none; returns the bytes of the new one.

    After a kill both are there, with the same entries.
    """
    written = 0
    if kept.any():
        data, places = shard.mapped(), np.flatnonzero(kept)
        entries = [shard.entry(data, place) for place in places.tolist()]
        written = write_shard(shard.path.parent, shard.keys[places], entries).stat().st_size
    remove_shard(shard.path)
    return written
