"""Shards of the feature cache: safetensors files of entries, with an index of their keys inside."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts import Features
from mm_core.errors import CacheError, plural
from mm_core.files import durable, os_reason, stage_name, sync_folder

Keys = np.ndarray[Any, np.dtype[np.void]]
"""Structured array of `KEY`."""

KEY = np.dtype([(name, "<u8") for name in ("high", "low", "content", "made", "encoder")])
"""The key of an entry (128 bits), and parts of it that show why another key is not there."""

FAULTY = int.from_bytes(b"a fault.", "little")
"""In the place of an encoder: the sample cannot be read, and the entry has the reason."""

SHARD_BYTES = 256 * 2**20
"""Features of more bytes are not collected for a shard."""

_VERSION = "mm_core feature cache 1"
_INDEX = "index"
_DTYPES = {
    **{"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16},
    **{"U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 32 * 2**20


@dataclass(frozen=True)
class _Column:
    """One tensor of equal entries: [N, *shape] from byte `start` of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Shard:
    """A shard as its header describes it. Entries of equal names, dtypes and shapes form a group.

    Attributes:
        path: of the file.
        keys: of the entries, group after group; the last ones may have no features.
        groups: number of entries, and their tensors.
    """

    path: Path
    keys: Keys
    groups: tuple[tuple[int, tuple[_Column, ...]], ...]

    def mapped(self) -> mmap.mmap:
        """The bytes of the file, mapped into memory.

        Raises:
            FileNotFoundError: it has been removed.
            CacheError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, str(error)) from None

    def entry(self, data: mmap.mmap, place: int) -> Features:
        """The features of an entry: tensors that share the mapped memory.

        Args:
            data: from `mapped`.
            place: number of the entry in the shard.
        """
        for count, columns in self.groups:
            if place < count:
                return {column.name: _row(data, column, place) for column in columns}
            place -= count
        return {}


def _row(data: mmap.mmap, column: _Column, place: int) -> Tensor:
    size = prod(column.shape)
    if not size:
        return torch.empty(column.shape, dtype=column.dtype)
    start = column.start + place * size * column.dtype.itemsize
    return torch.frombuffer(data, dtype=column.dtype, count=size, offset=start).view(column.shape)


def open_shard(path: Path) -> Shard:
    """Reads the header and the keys of a shard; a hostile header cannot do more than be refused.

    Raises:
        FileNotFoundError: it has been removed.
        CacheError: the file is damaged, or none of a feature cache of this version.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST_HEADER, size - 8):
                raise _unreadable(path, "it is shorter than its header")
            header: object = json.loads(file.read(length))
            columns = _columns(header, 8 + length, size)
            index = columns.pop(_INDEX, None)
            if index is None or index.dtype is not torch.int64 or index.shape[1:] != (KEY.itemsize // 8,):
                raise ValueError("it has no index")
            file.seek(index.start)
            keys = np.fromfile(file, KEY, index.shape[0])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, CacheError) else _unreadable(path, str(error)) from None
    named: dict[int, list[_Column]] = {}
    counts: dict[int, int] = {}
    for name, column in columns.items():
        group, _, own = name.partition("/")
        number = int(group) if group.isdigit() else -1
        if not own or number < 0 or counts.setdefault(number, column.shape[0]) != column.shape[0]:
            raise _unreadable(path, f"the tensor {name[:40]!r} has no place in it")
        named.setdefault(number, []).append(_Column(own, column.dtype, column.shape[1:], column.start))
    if sum(counts.values()) > len(keys):
        raise _unreadable(path, "its index is too short")
    return Shard(path, keys, tuple((counts[n], tuple(named[n])) for n in sorted(named)))


def _columns(header: object, first: int, size: int) -> dict[str, _Column]:
    """The tensors of a header, checked against the size of the file. ValueError if they do not fit."""
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    about = header.pop("__metadata__", {})
    if about.get("format") != _VERSION:
        raise ValueError(f"it is of another version: {str(about.get('format'))[:40]}")
    found = {}
    for name, entry in header.items():
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        if not whole or not shape or prod(shape) * dtype.itemsize != end - start:
            raise ValueError(f"the header of {name[:40]!r} contradicts itself")
        if first + end > size:
            raise ValueError(f"it is cut off: it declares {plural(first + end, 'byte')} and has {size}")
        found[name] = _Column(name, dtype, shape, first + start)
    return found


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
        entries: features on any device; {} has no features.

    Raises:
        CacheError: the folder is read-only, or the disk is full.
    """
    groups: dict[tuple[tuple[str, torch.dtype, torch.Size], ...], list[int]] = {}
    for place, entry in enumerate(entries):
        form = tuple((name, tensor.dtype, tensor.shape) for name, tensor in sorted(entry.items()))
        groups.setdefault(form, []).append(place)
    bare = groups.pop((), [])
    order = [place for places in groups.values() for place in places] + bare
    tensors: dict[str, Tensor] = {_INDEX: torch.from_numpy(keys[order].view("<i8").reshape(len(order), -1))}
    for number, (form, places) in enumerate(groups.items()):
        for name, dtype, _ in form:
            if dtype not in _NAMES:
                what = f"features of {dtype} cannot be cached"
                raise CacheError(what, where=name, accepted=", ".join(_DTYPES))
            tensors[f"{number}/{name}"] = torch.stack(
                [entries[place][name].detach().cpu() for place in places]
            )
    # Safetensors has no holes: with wide numbers first, all are aligned.
    named = dict(sorted(tensors.items(), key=lambda item: (item[0] != _INDEX, -item[1].dtype.itemsize)))
    header: dict[str, Any] = {"__metadata__": {"format": _VERSION}}
    end = 0
    for name, tensor in named.items():
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[name]["data_offsets"] = [end, end := end + tensor.nbytes]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = folder / f"{secrets.token_hex(8)}.safetensors"
    staged = path.with_name(stage_name(f".{path.stem}"))
    try:
        with durable(staged) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in named.values():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        staged.rename(path)
        sync_folder(folder)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise CacheError(
            f"the cache cannot be written: {os_reason(error)}",
            where=str(folder),
            hint="free space or change permissions there, then run the command again: it goes on from here",
        ) from None
    return path
