"""Several conversations in one row: which of them share one, and how a model keeps them apart.

Best-fit decreasing (Johnson et al. 1974, https://doi.org/10.1137/0203025; for language models Ding et al.
2024, https://arxiv.org/abs/2404.10830): from the longest to the shortest, each goes into the fullest row that
has room for it. Lengths alone decide what the rows look like, so there are equally many in every epoch; which
of the samples of one length takes which place is drawn from (seed, epoch).

A packed row has no attention mask, and positions that begin at 0 with each conversation. Of these, models of
Transformers make a block-diagonal causal mask (`masking_utils.find_packed_sequence_indices`), or the lengths
that FlashAttention's variable-length kernels take (`_prepare_from_posids`, for a batch of one row).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mm_core.contracts import Randomness
from mm_core.errors import PluginError


class Packs:
    """Rows of at most `capacity` tokens that hold every sample once an epoch.

    Args:
        lengths: [N] int64, tokens of each sample, 1 to `capacity`.
        capacity: tokens of a row.
        apart: [N] bool, samples that share rows with one another alone, the same ones in every epoch.
    """

    def __init__(self, lengths: Tensor, capacity: int, apart: Tensor | None = None) -> None:
        self.lengths, self.capacity = lengths, capacity
        self._apart = torch.zeros(len(lengths), dtype=torch.bool) if apart is None else apart
        order = self.ordered(torch.arange(len(lengths)))
        alone = int(self._apart.sum())
        first, rest = (
            torch.tensor(best_fit_decreasing(part.tolist(), capacity), dtype=torch.int64)
            for part in lengths[order].tensor_split([alone])
        )
        rows = torch.cat([first, rest + (int(first.max()) + 1 if alone else 0)])
        # Places in that order, row by row.
        self._places = rows.argsort(stable=True)
        self._ends = torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount().cumsum(0)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens."""
        return float(self.lengths.sum()) / (len(self) * self.capacity)

    @property
    def sizes(self) -> Tensor:
        """[rows] int64: tokens of each row, the same in every epoch."""
        placed = self.lengths[self.ordered(torch.arange(len(self.lengths)))][self._places]
        total = torch.cat([torch.zeros(1, dtype=torch.int64), placed.cumsum(0)])
        return total[self._ends].diff()

    def ordered(self, samples: Tensor) -> Tensor:
        """All samples as they are packed: those apart, then the others; each from the longest to the
        shortest, the others of one length in the order that they are given in."""
        apart, others = self._apart.nonzero().flatten(), samples[~self._apart[samples]]
        falling = (part[self.lengths[part].argsort(descending=True, stable=True)] for part in (apart, others))
        return torch.cat([*falling])

    def members(self, row: int, seed: int, epoch: int) -> list[int]:
        """The samples of a row of that epoch."""
        start, end = self._ends[row : row + 2].tolist()
        return [int(member) for member in _epoch(self, seed, epoch)[self._places[start:end]]]


@lru_cache(maxsize=2)
def _epoch(packs: Packs, seed: int, epoch: int) -> Tensor:
    """[N]: the samples as they are packed, those of one length in that epoch's order."""
    count = len(packs.lengths)
    return packs.ordered(torch.randperm(count, generator=Randomness(seed).generator("packs", epoch)))


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    """The row of each of these falling lengths."""
    room: dict[int, list[int]] = {}  # tokens that are left -> rows
    left = 0  # bit n: there are rows with n tokens left
    rows = 0
    found = []
    for length in lengths:
        fitting = left >> length
        if fitting:
            rest = length + (fitting & -fitting).bit_length() - 1
            row = room[rest].pop()
            if not room[rest]:
                left &= ~(1 << rest)
        else:
            rest, row = capacity, rows
            rows += 1
        found.append(row)
        rest -= length
        if rest:
            room.setdefault(rest, []).append(row)
            left |= 1 << rest
    return found


def positions(lengths: Sequence[int]) -> Tensor:
    """[sum of lengths] int64: each token's place in its own conversation."""
    return torch.cat([torch.arange(length) for length in lengths])


def check_support() -> None:
    """PluginError for a Transformers whose models would let packed conversations look at one another."""
    from transformers import __version__, masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        raise PluginError(
            f"Transformers {__version__} does not tell packed conversations apart",
            where="data.packing",
            accepted="transformers>=4.54",
            hint="pip install -U transformers, or set packing: false",
        )
