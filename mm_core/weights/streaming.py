"""Streaming stored tensors into a component, box by box: each rank reads only its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mm_core.device.torch_private import compute_local_shape_and_global_offset
from mm_core.errors import CheckpointError
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Box, Copy, box_of

_CHUNK = 64 * 2**20  # bytes buffered on their way into a shard, where they cannot be mapped


def stream(
    targets: Mapping[str, Tensor],
    copies: Iterable[tuple[Copy, StoredTensors]],
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    """Fills a component's tensors in place from weights files, cast to their dtype.

    Args:
        targets: tensors by the component's names: plain ones, or DTensors, of which this rank's shard is
            filled.
        copies: which box to read from which file.
        advance: called with the number of bytes after each piece read.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    shards = {name: shard_of(tensor) for name, tensor in targets.items()}
    for copy, stored in copies:
        _check_numbers(copy, stored, targets[copy.component])
        local, place = shards[copy.component]
        region = overlap(copy, place)
        if region is None:
            continue
        for piece in chunks(region, stored.dtypes[copy.stored].itemsize):
            read = read_box(copy, stored, piece)
            inside = [slice(p.start - o.start, p.stop - o.start) for p, o in zip(piece, place, strict=True)]
            local[tuple(inside)] = read
            advance(read.numel() * read.dtype.itemsize)


def _check_numbers(copy: Copy, stored: StoredTensors, target: Tensor) -> None:
    """CheckpointError if a weight's stored numbers are codes of it, or complex: a cast would not give it."""
    kind = stored.dtypes[copy.stored]
    matrix = len(copy.stored_shape) > 1 and not kind.is_floating_point and kind != torch.bool
    if target.is_floating_point() and (kind.is_complex or matrix):
        raise CheckpointError(
            f"{copy.stored} is stored as {str(kind).removeprefix('torch.')}, which is not the weight itself",
            where=copy.component,
            accepted="floating-point weights",
            hint="dequantise the file with the library that wrote it",
        )


def read_box(copy: Copy, stored: StoredTensors, box: Box) -> Tensor:
    """Reads a box of a component's tensor (inside `copy`) from a weights file: a view where possible."""
    inner = tuple(
        slice(part.start - start + offset, part.stop - start + offset)
        for part, start, offset in zip(box, copy.start, copy.stored_start, strict=True)
    )
    if copy.dims is None:
        return _read_seen(copy, stored, inner)
    theirs = tuple(inner[copy.dims.index(dim)] for dim in range(len(inner)))
    return _read_seen(copy, stored, theirs).permute(copy.dims)


def _read_seen(copy: Copy, stored: StoredTensors, box: Box) -> Tensor:
    """A box of a stored tensor, in the copy's view of it."""
    if copy.view is None:
        return stored.read(copy.stored, box)
    # Dimensions of length 1 may come before the first dimension that the file has.
    ones = copy.view.index(copy.stored_shape[0])
    view, box = copy.view[ones:], box[ones:]
    if view == copy.stored_shape:
        return stored.read(copy.stored, box)[(None,) * ones]
    rest = (slice(0, size) for size in copy.stored_shape[1:])
    rows = stored.read(copy.stored, (box[0], *rest))
    return rows.reshape(rows.shape[0], *view[1:])[(slice(None), *box[1:])][(None,) * ones]


def shard_of(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's shard of a tensor (the same memory), and the shard's box in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), box_of(tuple(starts), tuple(sizes))


def overlap(copy: Copy, place: Box) -> Box | None:
    """The box of a component's tensor that a copy from weights files and a shard share; None for none."""
    found = tuple(
        slice(max(start, part.start), min(start + size, part.stop))
        for start, size, part in zip(copy.start, copy.size, place, strict=True)
    )
    return found if all(part.start < part.stop for part in found) else None


def chunks(box: Box, itemsize: int) -> Iterable[Box]:
    """Splits a tensor's box into slabs along its first dimension, of at most 64 MiB where possible."""
    if not box:
        yield box
        return
    first, rest = box[0], box[1:]
    row = prod(part.stop - part.start for part in rest) * itemsize
    step = max(1, _CHUNK // max(row, 1))
    for start in range(first.start, first.stop, step):
        yield (slice(start, min(start + step, first.stop)), *rest)
