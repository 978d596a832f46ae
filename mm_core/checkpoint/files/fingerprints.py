"""Fingerprints of a sample of the live tensors, to check that a checkpoint contains the tensors in training.

They are computed from the live tensors, on their device, and compared with the bytes written to the file. A
stale or incomplete copy is refused; checksums cannot detect one, since they cover the written bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor

from mm_core.device.torch_private import is_traceable_wrapper_subclass
from mm_core.errors import CheckpointError
from mm_core.modules.flat_shards import FlatShard
from mm_core.modules.shards import local

_SHARE = 8  # one in this many tensors is compared at each save
_LANES = 64
_ROW = 8 * _LANES  # bytes


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of this rank's share of a tensor: 64 sums, modulo 2^64, of its bytes as 64-bit integers.

    Integer sums are equal on any device and in any order. Every 64th number has its own sum, so that most
    shifts and transpositions change the fingerprint.
    """

    name: str
    sums: tuple[int, ...]

    def check(self, written: Tensor, where: str) -> None:
        """Raises CheckpointError if the tensor about to be written to a checkpoint differs from the live one.

        Args:
            written: the tensor about to be written.
            where: the checkpoint's name, for the error.
        """
        if tuple(_sums(written).tolist()) != self.sums:
            raise CheckpointError(
                f"the copy of {self.name} to be saved differs from {self.name} in training:"
                " nothing was saved",
                where=where,
                hint="the copy in host memory is wrong: set checkpoint.async=false, and report this as a bug",
            )


def fingerprints(step: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Fingerprint]:
    """Fingerprints of a sample of the training state to be saved, by `part.name`.

    The sample is an eighth of each part and at least one tensor, drawn by `step` and name, the same on all
    ranks. Waits for each device once.
    """
    rows: dict[torch.device, dict[str, Tensor]] = {}
    for part, named in state.items():
        for name in drawn(step, named):
            for key, piece in _written(f"{part}.{name}", named[name]):
                sums = _sums(piece)
                rows.setdefault(sums.device, {})[key] = sums
    return {
        name: Fingerprint(name, tuple(sums))
        for found in rows.values()
        for name, sums in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
    }


def key_of(name: str, offset: Sequence[int] | None) -> str:
    """The key of a written piece's fingerprint: its tensor's name, and an offset that is not zero."""
    return name if offset is None or not any(offset) else f"{name}@{tuple(offset)}"


def _written(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What this rank writes of a tensor, by the keys of the fingerprints."""
    if isinstance(tensor, FlatShard):
        yield from ((key_of(name, offset), piece) for offset, piece in tensor.pieces().items())
    else:
        yield name, local(tensor)


def drawn(step: int, names: Iterable[str]) -> list[str]:
    """The names of the tensors whose fingerprints are compared when this step's checkpoint is saved."""
    order = sorted(names, key=lambda name: hashlib.blake2b(f"{step} {name}".encode()).digest())
    return order[: -(-len(order) // _SHARE)]


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """64 sums, on the tensor's device if it adds integers exactly. Does not wait for the device."""
    parts = (part if _adds_integers(part.device.type) else part.cpu() for part in plain_tensors(tensor))
    return reduce(torch.add, map(_lanes, parts))


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the tensors that a packed tensor (8-bit moments) consists of."""
    packed: object = tensor
    if not is_traceable_wrapper_subclass(packed):
        yield tensor
        return
    for name in packed.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(packed, name))


def _lanes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    data = plain.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // _ROW * _ROW
    rows, rest = data[:whole], data[whole:]
    if rows.storage_offset() % 8:
        rows = rows.clone()  # integers must be aligned to their size
    filled = torch.cat([rest, rest.new_zeros(_ROW - rest.numel())])
    return rows.view(torch.int64).view(-1, _LANES).sum(0) + filled.view(torch.int64)


@cache
def _adds_integers(kind: str) -> bool:
    """Whether a device type sums 64-bit integers exactly: a backend may not support it, or add as floats."""
    if kind == "cpu":
        return True
    numbers = torch.randint(0, 256, (33 * _ROW + 5,), generator=torch.Generator(), dtype=torch.uint8)
    try:
        return torch.equal(_lanes(numbers.to(kind)).cpu(), _lanes(numbers))
    except (RuntimeError, TypeError):
        return False
