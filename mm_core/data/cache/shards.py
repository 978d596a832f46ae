"""Shards of the feature cache: safetensors files of entries, with an index of their keys inside."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mm_core.contracts import Features
from mm_core.errors import CacheError
from mm_core.files import check_plain, durable, os_reason, stage_name, sync_folder

Keys = np.ndarray[Any, np.dtype[np.void]]
"""Structured array of `KEY`."""

KEY = np.dtype([(name, "<u8") for name in ("high", "low", "content", "made", "encoder")])
"""The key of an entry (128 bits), and parts of it that show why another key is not there."""

FAULTY = int.from_bytes(b"a fault.", "little")
"""In the place of an encoder: the sample cannot be read, and the entry has the reason."""

SHARD_BYTES = 256 * 2**20
"""Features of more bytes are not collected for a shard."""

DAMAGED = "its entry in the cache is damaged: the checksum is another one than when it was written"
NOT_FINITE = "its entry in the cache has numbers that are not finite"

_VERSION = "mm_core feature cache 2"
_WITHOUT_SUMS = "mm_core feature cache 1"
_INDEX = "index"
_NUMBER = re.compile("[0-9]{1,9}")  # int() takes no 5,000 digits, and '²' is one for isdigit()


@dataclass(frozen=True)
class Shard:
    """A shard as its header describes it. Entries of equal names, dtypes and shapes form a group.

    Attributes:
        path: of the file.
        keys: of the entries, group after group; the last ones may have no features.
        groups: number of entries, and the names of their tensors in the entry and in the file.
        sums: checksums of the entries; None in a file that was written before there were any.
    """

    path: Path
    keys: Keys
    groups: tuple[tuple[int, Mapping[str, str]], ...]
    sums: np.ndarray[Any, np.dtype[np.int64]] | None

    def entry(self, data: Any, place: int) -> Features:
        """The features of an entry, in memory of their own: what is sent to a process takes no others along.

        Args:
            data: from `mapped`.
            place: number of the entry in the shard.

        Raises:
            CacheError: the entry is damaged, or not finite.
        """
        features = self._features(data, place)
        if fault := self._fault(place, features):
            raise CacheError(
                f"a sample's features cannot be used: {fault}",
                where=f"{self.path}, key {self.keys[place].tobytes()[:16].hex()}",
                hint="run `mm cache build` with this run's config: it encodes them again",
            )
        return features

    def faults(self) -> dict[int, str]:
        """Reads all entries: why those that cannot be used cannot, by place.

        Raises:
            CacheError: the file cannot be read.
        """
        with suppress(FileNotFoundError):  # another process has removed it
            data = mapped(self.path)
            each = ((n, self._fault(n, self._features(data, n))) for n in range(len(self.keys)))
            return {place: fault for place, fault in each if fault}
        return {}

    def _features(self, data: Any, place: int) -> Features:
        for count, names in self.groups:
            if place < count:
                try:
                    return {name: data.get_slice(stored)[place].clone() for name, stored in names.items()}
                except (IndexError, SafetensorError) as error:  # damaged since it was opened
                    raise _unreadable(self.path, str(error)) from None
            place -= count
        return {}

    def _fault(self, place: int, features: Features) -> str:
        if self.sums is not None and self.sums[place] != _checksum(self.keys[place], features):
            return DAMAGED
        return "" if finite(features) else NOT_FINITE


def finite(features: Mapping[str, Tensor]) -> bool:
    """Whether all numbers of an entry are finite."""
    floats = (each for each in features.values() if each.is_floating_point() and each.numel())
    # NaN is the minimum of what has any; 10 times as fast as `isfinite` of each element
    ends = ((each.float() if each.itemsize == 1 else each).aminmax() for each in floats)
    return all(bool(each.min.isfinite() & each.max.isfinite()) for each in ends)


def _checksum(key: np.void, features: Mapping[str, Tensor]) -> int:
    """The crc32 of an entry: its key, and the name, dtype, shape and bytes of each of its features."""
    found = zlib.crc32(key.tobytes())
    for name, tensor in sorted(features.items()):
        found = zlib.crc32(f"{name}: {tensor.dtype} {[*tensor.shape]}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def mapped(path: Path) -> Any:
    """A shard's file, mapped into memory.

    Raises:
        FileNotFoundError: it has been removed.
        CacheError: it cannot be read.
    """
    try:
        check_plain(path)
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error)) from None


def open_shard(path: Path) -> Shard:
    """Reads the header and the keys of a shard; a hostile header cannot do more than be refused.

    Raises:
        FileNotFoundError: it has been removed.
        CacheError: the file is damaged, or none of a feature cache of this version.
    """
    data = mapped(path)
    found = (data.metadata() or {}).get("format")
    if found not in (_VERSION, _WITHOUT_SUMS):
        raise _unreadable(path, f"it is of another version: {str(found)[:40]}")
    names = [*data.keys()]
    index = data.get_tensor(_INDEX) if _INDEX in names else torch.empty(0)
    fields = KEY.itemsize // 8
    if index.dtype is not torch.int64 or index.shape[1:] != (fields + (found == _VERSION),):
        raise _unreadable(path, "it has no index")
    groups: dict[int, tuple[int, dict[str, str]]] = {}
    for name in names:
        if name != _INDEX:
            group, _, own = name.partition("/")
            count, *_ = data.get_slice(name).get_shape() or [-1]
            known = groups.setdefault(int(group), (count, {})) if _NUMBER.fullmatch(group) else (-1, {})
            if not own or count < 0 or count != known[0]:
                raise _unreadable(path, f"the tensor {name[:40]!r} has no place in it")
            known[1][own] = name
    if sum(count for count, _ in groups.values()) > len(index):
        raise _unreadable(path, "its index is too short")
    keys = index[:, :fields].contiguous().numpy().view(KEY)[:, 0].copy()
    sums = index[:, fields].numpy().copy() if found == _VERSION else None
    return Shard(path, keys, tuple(groups[n] for n in sorted(groups)), sums)


def size_of(features: Mapping[str, Tensor]) -> int:
    """Bytes of the features of an entry."""
    return sum(tensor.nbytes for tensor in features.values())


def _unreadable(path: Path, why: str) -> CacheError:
    return CacheError(
        f"the shard cannot be read: {why}",
        where=str(path),
        hint="delete this file and run `mm cache build` again: only its entries are encoded anew",
    )


def write_shard(folder: Path, keys: Keys, entries: Sequence[Mapping[str, Tensor]]) -> Path:
    """Writes a shard under a new name, completely or not at all; it is on disk when this returns.

    Args:
        folder: of the shards.
        keys: one for each entry.
        entries: features in host memory; {} has no features.

    Raises:
        CacheError: the folder is read-only, or the disk is full.
    """
    groups: dict[tuple[tuple[str, torch.dtype, torch.Size], ...], list[int]] = {}
    for place, entry in enumerate(entries):
        form = tuple((name, tensor.dtype, tensor.shape) for name, tensor in sorted(entry.items()))
        groups.setdefault(form, []).append(place)
    bare = groups.pop((), [])
    order = [place for places in groups.values() for place in places] + bare
    sums = np.array([_checksum(keys[place], entries[place]) for place in order], "<i8")
    index = np.column_stack([keys[order].view("<i8").reshape(len(order), -1), sums])
    tensors: dict[str, Tensor] = {_INDEX: torch.from_numpy(index)}
    for number, (form, places) in enumerate(groups.items()):
        for name, dtype, _ in form:
            try:
                save({name: torch.empty(0, dtype=dtype)})
            except (KeyError, SafetensorError):
                what, accepted = f"features of {dtype} cannot be cached", "the dtypes of safetensors"
                hint = "let the task's `features` return another dtype"
                raise CacheError(what, where=name, accepted=accepted, hint=hint) from None
            tensors[f"{number}/{name}"] = torch.stack([entries[place][name] for place in places])
    path = folder / f"{secrets.token_hex(8)}.safetensors"
    staged = path.with_name(stage_name(f".{path.stem}"))
    with writing(folder):
        try:
            with durable(staged) as file:  # `save_file` would rename a file of its own, unsynced and private
                file.write(save(tensors, {"format": _VERSION}))
            staged.rename(path)
            sync_folder(folder)
        finally:
            staged.unlink(missing_ok=True)
    return path


def remove_shard(path: Path) -> None:
    """Removes a shard, also one that another process is removing.

    Raises:
        CacheError: the folder is read-only.
    """
    with writing(path.parent):
        path.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context in which a folder of the cache that cannot be written is a CacheError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"the cache cannot be written: {os_reason(error) if isinstance(error, OSError) else error}",
            where=str(folder),
            hint="free space or change permissions there, then run the command again: it goes on from here",
        ) from None
