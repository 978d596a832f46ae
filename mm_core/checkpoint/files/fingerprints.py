"""Proof that a checkpoint holds the tensors in training: fingerprints of a sample of them.

They are taken from the live tensors, on their device, and compared with the bytes as these go to the file. A
copy that is stale or incomplete is refused; checksums cannot see one, since they are of what is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mm_core.errors import CheckpointError
from mm_core.modules.shards import local

_SHARE = 8  # one tensor of so many is compared in each save
_LANES = 64
_ROW = 8 * _LANES  # bytes


@dataclass(frozen=True)
class Fingerprint:
    """Of this rank's share of a tensor: 64 sums, modulo 2^64, of its bytes taken as 64-bit integers.

    Sums of integers are the same on any device, in any order; each 64th number has a sum of its own, so that
    most shifts and transpositions show as well.
    """

    name: str
    sums: tuple[int, ...]

    def check(self, written: Tensor, where: str) -> None:
        """CheckpointError where `written`, on its way to the checkpoint `where`, is another tensor."""
        if tuple(_sums(written).tolist()) != self.sums:
            raise CheckpointError(
                f"{self.name} as it was to be written is not {self.name} in training, so nothing was saved",
                where=where,
                hint="the copy on the host is wrong: set checkpoint.async=false, and report this",
            )


def fingerprints(step: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Fingerprint]:
    """Fingerprints of a sample of the state, by `part.name`. Waits for each device once.

    Which tensors: an eighth of each part and at least one, drawn by `step` and name; the same on all ranks.
    """
    rows: dict[torch.device, dict[str, Tensor]] = {}
    for part, named in state.items():
        for name in drawn(step, named):
            sums = _sums(local(named[name]))
            rows.setdefault(sums.device, {})[f"{part}.{name}"] = sums
    return {
        name: Fingerprint(name, tuple(sums))
        for found in rows.values()
        for name, sums in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
    }


def drawn(step: int, names: Iterable[str]) -> list[str]:
    """The names that the save of a step compares; other steps draw others."""
    order = sorted(names, key=lambda name: hashlib.blake2b(f"{step} {name}".encode()).digest())
    return order[: -(-len(order) // _SHARE)]


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """64 sums, on the tensor's device where that adds integers to the bit. Waits for nothing there."""
    parts = (part if _adds_integers(part.device.type) else part.cpu() for part in _plain(tensor))
    return reduce(torch.add, map(_lanes, parts))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or what a packed kind of tensor (8-bit moments) is made of."""
    packed: object = tensor
    if not is_traceable_wrapper_subclass(packed):
        yield tensor
        return
    for name in packed.__tensor_flatten__()[0]:
        yield from _plain(getattr(packed, name))


def _lanes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    data = plain.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // _ROW * _ROW
    rows, rest = data[:whole], data[whole:]
    if rows.storage_offset() % 8:
        rows = rows.clone()  # integers lie at multiples of their size
    filled = torch.cat([rest, rest.new_zeros(_ROW - rest.numel())])
    return rows.view(torch.int64).view(-1, _LANES).sum(0) + filled.view(torch.int64)


@cache
def _adds_integers(kind: str) -> bool:
    """Whether a kind of device sums 64-bit integers exactly: a backend may lack it, or add them as floats."""
    if kind == "cpu":
        return True
    numbers = torch.randint(0, 256, (33 * _ROW + 5,), generator=torch.Generator(), dtype=torch.uint8)
    try:
        return torch.equal(_lanes(numbers.to(kind)).cpu(), _lanes(numbers))
    except (RuntimeError, TypeError):
        return False
