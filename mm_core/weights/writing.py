"""Writing safetensors files tensor by tensor: memory holds one tensor, never a complete file.

The header of such a file contains the position of every tensor, so names, dtypes and shapes must be known
before the first byte: https://huggingface.co/docs/safetensors. Shards and their index have the same names as
those of Transformers and Diffusers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mm_core.errors import MMError
from mm_core.files import durable
from mm_core.weights.formats.key_map import Copy, Shape, box_of
from mm_core.weights.stored import DTYPES, INDEX

_NAMES = {kind: name for name, kind in DTYPES.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B|B?)\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class TensorSpec:
    """The entry of one tensor in the header of a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the weights file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One weights file of a model: its name, and its tensors in file order."""

    file: str
    tensors: tuple[TensorSpec, ...]


def parse_size(text: str | int) -> int:
    """The bytes of a file size: `5GB` (10^9), `5GiB` (2^30), `500MB`, or a number.

    Raises:
        MMError: anything else, or less than one byte.
    """
    found = _SIZE.match(str(text))
    size = 0
    if found is not None:
        power = " KMGT".index((found[2] or " ").upper())
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size < 1:
        raise MMError(f"{text!r} is not a file size", accepted="5GB, 4.5GiB, 500MB, ...")
    return size


def plan_shards(tensors: Sequence[TensorSpec], stem: str, max_shard: int | None = None) -> list[Shard]:
    """Decides which tensor of a model goes into which safetensors file.

    Args:
        tensors: in the order of the model.
        stem: file name without `.safetensors` or the shard number.
        max_shard: largest file in bytes; a larger tensor gets a file of its own. None: one file.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if max_shard is not None and groups[-1] and size + tensor.nbytes > max_shard:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    names = [f"{stem}.safetensors"]
    if len(groups) > 1:
        names = [f"{stem}-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    # Wide dtypes first: every tensor then begins at a multiple of its item size, which mapping needs.
    return [
        Shard(name, tuple(sorted(group, key=lambda tensor: -tensor.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def write_shards(
    folder: Path,
    shards: Sequence[Shard],
    produce: Callable[[str], Tensor],
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> list[Path]:
    """Writes the safetensors files of a model, and an index for several; returns when they are on disk.

    Args:
        folder: an existing folder.
        shards: result of `plan_shards`.
        produce: returns a tensor by name, with the shape and dtype of its spec, on any device; called once
            per tensor.
        stem: start of the index file's name.
        metadata: texts for the header of each file.
        advance: called with the bytes after each tensor.
    """
    written = []
    for shard in shards:
        path = folder / shard.file
        with durable(path) as file:
            file.write(header(shard.tensors, metadata or {}))
            for spec in shard.tensors:
                _write_tensor(file, spec, produce(spec.name))
                advance(spec.nbytes)
        written.append(path)
    if len(shards) > 1:
        total = sum(spec.nbytes for shard in shards for spec in shard.tensors)
        places = {spec.name: shard.file for shard in shards for spec in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        with durable(folder / f"{stem}{INDEX}") as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
        written.append(folder / f"{stem}{INDEX}")
    return written


def write_nested(
    path: Path,
    key: str,
    tensors: Sequence[TensorSpec],
    produce: Callable[[str], Tensor],
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes a model as a torch.save file with its tensors below a key: all of them are in memory at once.

    Args:
        path: the file.
        key: what holds the tensors in it.
        tensors: what to write.
        produce, advance: see `write_shards`.
    """
    held = {}
    for spec in tensors:
        held[spec.name] = produce(spec.name).detach().cpu().contiguous()
        advance(spec.nbytes)
    with durable(path) as file:
        torch.save({key: held}, file)


def header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: 8 bytes of length, then JSON padded with spaces to 8 bytes."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in tensors:
        if spec.dtype not in _NAMES:
            raise MMError(
                f"{spec.name} has dtype {str(spec.dtype).removeprefix('torch.')}, which a safetensors file"
                " cannot contain",
                accepted=", ".join(_NAMES.values()),
                hint="convert it in the component's state_dict, or export with --dtype bf16",
            )
        begin, end = end, end + spec.nbytes
        document[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: IO[bytes], spec: TensorSpec, tensor: Tensor) -> None:
    assert tensor.dtype == spec.dtype and tuple(tensor.shape) == spec.shape, spec.name
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)


def assemble(copies: Sequence[Copy], read: Callable[[str], Tensor]) -> Tensor:
    """Builds one tensor of a weights file from a component's tensors: the reverse of `stream`.

    Args:
        copies: all copies that belong to this stored tensor.
        read: returns a component's tensor by name, on CPU; those of one stored tensor have one dtype.
    """
    first = copies[0]
    tensor = read(first.component)
    plain = first.view is None and first.dims is None
    if plain and len(copies) == 1 and first.size == first.stored_shape == tuple(tensor.shape):
        return tensor
    stored = torch.empty(first.stored_shape, dtype=tensor.dtype)
    for copy in copies:
        seen = stored if copy.view is None else stored.view(copy.view)
        seen = seen if copy.dims is None else seen.permute(copy.dims)
        held = tensor if copy is first else read(copy.component)
        seen[box_of(copy.stored_start, copy.size)].copy_(held[box_of(copy.start, copy.size)])
    return stored
