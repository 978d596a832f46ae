"""Reads `.metadata` of a checkpoint, a pickle, without running code in it, and checks its content.

The unpickler creates no torch objects. Each name that a save writes becomes a placeholder made for this file:
whatever a pickle sets on it, even on its class, is discarded with it. Torch objects are then built from the
values of their own fields only.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mm_core.checkpoint.files.layout import (
    ABSENT,
    DISTRUST,
    METADATA,
    OTHER,
    Checksum,
    DamagedError,
    unreadable,
)
from mm_core.errors import CheckpointError
from mm_core.files import open_plain
from mm_core.weights.stored import Inert

_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_FIELDS: dict[type, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in (
        (Metadata, "state_dict_metadata planner_data storage_data storage_meta version"),
        (MetadataIndex, "fqn offset index"),
        (TensorStorageMetadata, "properties size chunks"),
        (ChunkStorageMetadata, "offsets sizes"),
        (_StorageInfo, "relative_path offset length transform_descriptors"),
    )
}
"""Fields written by any supported torch version: metadata from a newer torch is not damaged."""
_RECORDS = {(kind.__module__, kind.__name__): kind for kind in (*_FIELDS, StorageMeta, TensorProperties)}


class _Record:
    """An object of the pickle: only its state is kept."""

    kind: type
    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _values(found: object, kind: type) -> dict[str, Any]:
    """The fields of a record of type `kind`. CheckpointError for another type or an unknown field."""
    if not isinstance(found, _Record) or found.kind is not kind or not isinstance(found.state, dict):
        raise CheckpointError(".metadata does not describe a checkpoint")
    for name in found.state:
        if name not in _FIELDS[kind]:
            raise CheckpointError(f".metadata sets the unknown field {str(name)[:60]!r} on a {kind.__name__}")
    return found.state


class _Unpickler(pickle.Unpickler):
    """Resolves only the names that a `.metadata` consists of, as placeholders."""

    def __init__(self, stream: IO[bytes], foreign: bool) -> None:
        super().__init__(stream)
        self._foreign = foreign
        self._stand_ins: dict[tuple[str, str], object] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]  # neither a dtype nor a layout takes an attribute
        if (module, name) not in self._stand_ins:
            try:
                self._stand_ins[module, name] = _stand_in(module, name)
            except CheckpointError:
                if not self._foreign:
                    raise
                self._stand_ins[module, name] = type("Inert", (Inert,), {})
        return self._stand_ins[module, name]


def _stand_in(module: str, name: str) -> object:
    if (kind := _RECORDS.get((module, name))) is not None:
        return type(name, (_Record,), {"kind": kind})
    calls: dict[tuple[str, str], Callable[..., object]] = {
        ("torch", "Size"): lambda sizes: torch.Size(sizes),
        ("torch.serialization", "_get_layout"): lambda layout: torch.serialization._get_layout(layout),  # type: ignore[no-untyped-call]
        # A member of an enumeration would accept attributes; the memory formats are rebuilt from the numbers.
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): lambda number: int(number),
    }
    if (module, name) in calls:
        return calls[module, name]
    raise CheckpointError(
        f"loading was refused: the checkpoint's .metadata, a pickle, asks to import {module}.{name}, which a"
        " checkpoint of mm_core never needs and which could run code"
    )


def read_metadata(folder: Path, files: Mapping[str, Checksum], *, foreign: bool = False) -> Metadata:
    """Reads `.metadata` of a checkpoint without running code; it may refer only to bytes in `files`.

    Args:
        folder: the checkpoint.
        files: its files.
        foreign: another program wrote it: what is not a tensor is left out.
    """
    try:
        with open_plain(folder / METADATA) as stream:
            found = _metadata(_Unpickler(stream, foreign).load(), files)
    except CheckpointError as fault:
        raise DamagedError(fault.what, where=str(folder), hint=DISTRUST) from None
    except Exception as fault:
        if isinstance(fault, OSError) and not isinstance(fault, ABSENT):
            raise unreadable(folder / METADATA, fault) from fault
        # A pickle can fail in any way that the calls in it can; all mean the same to the user.
        raise DamagedError(
            f".metadata cannot be read ({type(fault).__name__}: {fault})", where=str(folder), hint=OTHER
        ) from None
    return found


def _metadata(found: object, files: Mapping[str, Checksum]) -> Metadata:
    """Every entry is a tensor, fully covered by chunks, in a file of this checkpoint."""
    held = _values(found, Metadata)
    entries: dict[str, STORAGE_TYPES] = {
        str(name): _entry(str(name), one)
        for name, one in _items(held["state_dict_metadata"])
        if not isinstance(one, Inert)
    }
    places = dict(_place(index, one, files) for index, one in _items(held["storage_data"]))
    return Metadata(state_dict_metadata=entries, storage_data=places)


def _items(value: object) -> Iterable[tuple[object, object]]:
    if not isinstance(value, Mapping):
        raise CheckpointError(".metadata does not describe a checkpoint")
    return value.items()


def _entry(name: str, entry: object) -> TensorStorageMetadata:
    if not isinstance(entry, _Record) or entry.kind is not TensorStorageMetadata:
        raise CheckpointError(f".metadata lists {name!r}, which is not a tensor")
    held = _values(entry, TensorStorageMetadata)
    dtype, layout, *_ = held["properties"].state
    if not isinstance(dtype, torch.dtype) or not isinstance(layout, torch.layout):
        raise CheckpointError(f".metadata contains no dtype for {name!r}")
    # The other properties describe the tensor's memory when it was saved; reading does not need them.
    properties = TensorProperties(dtype=dtype, layout=layout)
    chunks = [_values(chunk, ChunkStorageMetadata) for chunk in held["chunks"]]
    size = _size(held["size"])
    places = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    filled = [place for place in places if math.prod(place.sizes)]
    inside = all(
        at + length <= whole
        for place in filled
        for at, length, whole in zip(place.offsets, place.sizes, size, strict=True)
    )
    total = sum(math.prod(place.sizes) for place in filled)
    if total != math.prod(size) or len({place.offsets for place in filled}) < len(filled) or not inside:
        raise CheckpointError(f".metadata does not list where all values of {name!r} are stored")
    return TensorStorageMetadata(properties=properties, size=size, chunks=places)


def _place(
    index: object, stored: object, files: Mapping[str, Checksum]
) -> tuple[MetadataIndex, _StorageInfo]:
    named, held = _values(index, MetadataIndex), _values(stored, _StorageInfo)
    if held["relative_path"] not in files or held.get("transform_descriptors"):
        raise CheckpointError(".metadata points outside the files of this checkpoint")
    start, length = held["offset"], held["length"]
    if type(start) is not int or type(length) is not int:  # excludes True, which is an instance of int
        raise CheckpointError(".metadata does not describe a checkpoint")
    if start < 0 or length <= 0 or start + length > files[held["relative_path"]].size:
        raise CheckpointError(f".metadata points beyond the bytes of {held['relative_path']}")
    offset = named.get("offset")
    return (
        MetadataIndex(str(named["fqn"]), None if offset is None else _size(offset), named.get("index")),
        _StorageInfo(str(held["relative_path"]), start, length),
    )


def _size(value: object) -> torch.Size:
    if not isinstance(value, torch.Size) or any(number < 0 for number in value):
        raise CheckpointError(".metadata does not describe a checkpoint")
    return value
