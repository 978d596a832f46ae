"""Whether stored tensors are still those that they were, without reading them whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from mm_core.weights.formats.format import StoredTensors

_NUMBERS = 512
"""Numbers of a piece of a tensor that is looked at."""

_PIECES = 16
"""Pieces of a tensor, evenly from its beginning to its end: more would make a model of many experts slow."""


def fingerprint(tensors: Iterable[tuple[str, StoredTensors]]) -> str:
    """sha256 over the name, dtype and shape of stored tensors, and pieces of each.

    A model that was trained on, or another one of the same architecture, differs in it; a file that was cut
    into other shards does not. Numbers that were changed between the pieces alone are not noticed.

    Raises CheckpointError for a file that cannot be read.
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
    """Pieces of a tensor as (start, stop) of each dimension, along its diagonal."""
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
