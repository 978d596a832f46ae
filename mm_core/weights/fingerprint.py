"""Whether stored tensors are unchanged, found without reading all of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from mm_core.weights.formats.format import StoredTensors

_NUMBERS = 512
"""Numbers in each piece of a tensor that is read."""

_PIECES = 16
"""Pieces read from a tensor, evenly spaced: more would be slow for a model with many experts."""


def fingerprint(tensors: Iterable[tuple[str, StoredTensors]]) -> str:
    """sha256 over the names, dtypes and shapes of tensors in weights files, and over pieces of each tensor.

    It differs for a model that was trained further, and for another model of the same architecture. It stays
    the same when a file is split into different shards. Changes only between the pieces go unnoticed.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    digest = hashlib.sha256()
    for name, stored in tensors:
        shape = tuple(stored.shapes[name])
        digest.update(f"{name} {stored.dtypes[name]} {shape}\n".encode())
        for box in _boxes(shape):
            piece = stored.read(name, tuple(slice(start, stop) for start, stop in box))
            digest.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _boxes(shape: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Pieces along the diagonal of a tensor, as (start, stop) of each dimension."""
    room, taken = _NUMBERS, []
    for size in reversed(shape):
        taken.append(min(size, max(room, 1)))
        room //= max(taken[-1], 1)
    sizes = list(zip(shape, reversed(taken), strict=True))
    places = (
        tuple((at := n * (size - part) // (_PIECES - 1), at + part) for size, part in sizes)
        for n in range(_PIECES)
    )
    return list(dict.fromkeys(places))
