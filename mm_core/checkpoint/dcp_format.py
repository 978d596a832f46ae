"""Weights in folders of torch.distributed.checkpoint that other programs have written. They are only read."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from mm_core.checkpoint.files.layout import FACTS, METADATA, Checksum, DamagedError
from mm_core.checkpoint.files.metadata import read_metadata
from mm_core.contracts import TaskModule
from mm_core.files import open_plain
from mm_core.weights.archives import check_archive
from mm_core.weights.formats.format import AdapterLayout, Companions, Layout, StoredTensors, Written
from mm_core.weights.formats.key_map import Shape
from mm_core.weights.formats.libraries import Diffusers, Transformers
from mm_core.weights.formats.part_of import Below

_HINT = "save it again with tensors only, or convert it with the program that wrote it"


class DcpTensors:
    """The tensors in a folder of torch.distributed.checkpoint, also one of many ranks; no code in it runs.

    Args:
        folder: with `.metadata` and the ranks' `.distcp` files.

    Raises:
        CheckpointError: files are missing or damaged, or refer to anything but tensors.
    """

    others: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self.where = folder
        files = {path.name: Checksum(path.stat().st_size, 0) for path in folder.glob("*.distcp")}
        try:
            self._held = read_metadata(folder, files, foreign=True)
        except DamagedError as fault:
            raise DamagedError(fault.what, where=fault.where, hint=_HINT) from None
        self._entries = {
            name: entry
            for name, entry in self._held.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.shapes: Mapping[str, Shape] = {name: tuple(entry.size) for name, entry in self._entries.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in self._entries.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, from the pieces of all ranks that reach into it."""
        entry = self._entries[name]
        whole = [slice(None)] * (len(entry.size) - len(box))
        wanted = [one.indices(size)[:2] for one, size in zip((*box, *whole), entry.size, strict=True)]
        found = torch.zeros([stop - start for start, stop in wanted], dtype=self.dtypes[name])
        for chunk in entry.chunks:
            bounds = zip(wanted, chunk.offsets, chunk.sizes, strict=True)
            shared = [(max(start, at), min(stop, at + size), start, at) for (start, stop), at, size in bounds]
            if all(first < last for first, last, *_ in shared):
                piece = self._piece(name, chunk, self.dtypes[name])
                here = tuple(slice(first - start, last - start) for first, last, start, _ in shared)
                found[here] = piece[tuple(slice(first - at, last - at) for first, last, _, at in shared)]
        return found

    def _piece(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        if index not in self._held.storage_data:
            raise DamagedError(f"no file holds a piece of {name}", where=str(self.where), hint=_HINT)
        place = self._held.storage_data[index]
        with open_plain(self.where / place.relative_path) as file:
            try:
                check_archive(file, place.offset, place.length)
                file.seek(place.offset)
                found: object = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
            except Exception as fault:  # a pickle can fail in any way that the calls in it can
                what = f"{place.relative_path} holds no tensor for {name} ({type(fault).__name__})"
                raise DamagedError(what, where=str(self.where), hint=_HINT) from None
        if not isinstance(found, Tensor) or found.shape != chunk.sizes or found.dtype != dtype:
            what = f"a piece of {name} is no tensor of the shape and dtype that .metadata gives it"
            raise DamagedError(what, where=str(self.where), hint=_HINT)
        return found


class Dcp:
    """The weight format `dcp`: a folder that torch.distributed.checkpoint wrote, as FSDP2 trainers save."""

    def recognises(self, path: Path) -> bool:
        """Whether a folder is one of torch.distributed.checkpoint, and not a checkpoint of ours."""
        return (path / METADATA).is_file() and any(path.glob("*.distcp")) and not (path / FACTS).exists()

    def folders(self, path: Path) -> Sequence[str]:
        """What may stand before a model's own names, as if it were their folder: ".", "model", ..."""
        names = [name.split(".") for name in DcpTensors(path).shapes]
        return [".", *sorted({".".join(name[:depth]) for name in names for depth in _depths(name)})]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the tensors whose names begin with `folder`."""
        return Below(DcpTensors(path), f"{folder}." if folder not in ("", ".") else "")

    def layout(self, name: str, component: nn.Module) -> Layout:
        """The names of the model's library where it is one of a library, else its own."""
        found = Diffusers().layout(name, component) or Transformers().layout(name, component) or Layout()
        return replace(found, folder="", read_only=True)

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """None: other programs write adapters as files of their own."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """None: nothing is written."""
        return Companions()


def _depths(parts: Sequence[str]) -> Iterator[int]:
    """How many of a name's first parts may stand before the model's own name: none is a number."""
    for depth, part in enumerate(parts[:4], 1):
        if part.isdigit() or depth == len(parts):
            return
        yield depth
