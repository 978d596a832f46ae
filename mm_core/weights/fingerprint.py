"""Whether stored tensors are still those that they were, without reading them whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from mm_core.weights.format import StoredTensors

_ENDS = 512
"""Numbers at either end of a tensor that are looked at."""


def fingerprint(tensors: Iterable[tuple[str, StoredTensors]]) -> str:
    """sha256 over the name, dtype and shape of stored tensors, and the first and last numbers of each.

    A model that was trained on, or another one of the same architecture, differs in it; a file that was cut
    into other shards does not. A few numbers that were changed in the middle of a tensor are not noticed.

    Raises CheckpointError for a file that can not be read.
    """
    digest = hashlib.sha256()
    for name, stored in tensors:
        shape = tuple(stored.shapes[name])
        digest.update(f"{name} {stored.dtypes[name]} {shape}\n".encode())
        for last in (False, True):
            end = stored.read(name, _end(shape, last))
            digest.update(end.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _end(shape: Sequence[int], last: bool) -> tuple[slice, ...]:
    """A box of about `_ENDS` numbers at the beginning or the end of a tensor."""
    room, box = _ENDS, []
    for size in reversed(shape):
        taken = min(size, max(room, 1))
        box.append(slice(size - taken, size) if last else slice(0, taken))
        room //= max(taken, 1)
    return tuple(reversed(box))
