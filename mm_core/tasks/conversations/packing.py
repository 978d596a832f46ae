"""Packs several conversations into one row: which ones share a row, and how a model separates them.

Best-fit decreasing (Johnson et al. 1974, https://doi.org/10.1137/0203025; for language models Ding et al.
2024, https://arxiv.org/abs/2404.10830): from the longest to the shortest, each conversation goes into the
fullest row with enough room. Only lengths decide the shape of the rows, so every epoch has the same number of
rows. Which of the samples of equal length takes which place is drawn from (seed, epoch).

A packed row has no attention mask; its positions start at 0 for each conversation. From these positions,
models of Transformers derive a block-diagonal causal mask (`masking_utils.find_packed_sequence_indices`),
or the lengths for FlashAttention's variable-length kernels (`_prepare_from_posids`, for a batch of one
row).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mm_core.contracts import Randomness


class Packs:
    """Packed rows of at most `capacity` tokens; an epoch contains every sample once.

    Args:
        lengths: tokens of each sample [N] int64, 1 to `capacity`.
        capacity: largest number of tokens in a row.
        separate: [N] bool: samples that share rows only with each other, the same ones in every epoch.
    """

    def __init__(self, lengths: Tensor, capacity: int, separate: Tensor | None = None) -> None:
        self.lengths, self.capacity = lengths, capacity
        self._separate = torch.zeros(len(lengths), dtype=torch.bool) if separate is None else separate
        order = self.ordered(torch.arange(len(lengths)))
        alone = int(self._separate.sum())
        first, rest = (
            torch.tensor(best_fit_decreasing(part.tolist(), capacity), dtype=torch.int64)
            for part in lengths[order].tensor_split([alone])
        )
        rows = torch.cat([first, rest + (int(first.max()) + 1 if alone else 0)])
        # Places in this order, row by row.
        self._places = rows.argsort(stable=True)
        self._ends = torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount().cumsum(0)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def fill(self) -> float:
        """Share of the packed rows' capacity that is filled with tokens."""
        return float(self.lengths.sum()) / (len(self) * self.capacity)

    @property
    def sizes(self) -> Tensor:
        """Tokens of each packed row [rows] int64, the same in every epoch."""
        placed = self.lengths[self.ordered(torch.arange(len(self.lengths)))][self._places]
        total = torch.cat([torch.zeros(1, dtype=torch.int64), placed.cumsum(0)])
        return total[self._ends].diff()

    def ordered(self, samples: Tensor) -> Tensor:
        """Samples in the order in which they are packed: the separate ones first, then the others; each group
        from the longest to the shortest. Others of equal length keep the order of `samples`."""
        separate, others = self._separate.nonzero().flatten(), samples[~self._separate[samples]]
        falling = (
            part[self.lengths[part].argsort(descending=True, stable=True)] for part in (separate, others)
        )
        return torch.cat([*falling])

    def members(self, row: int, seed: int, epoch: int) -> list[int]:
        """The samples in a packed row of an epoch.

        Args:
            row: number of the row.
            seed: seed of the run.
            epoch: number of the epoch.
        """
        start, end = self._ends[row : row + 2].tolist()
        return [int(member) for member in _epoch(self, seed, epoch)[self._places[start:end]]]


@lru_cache(maxsize=2)
def _epoch(packs: Packs, seed: int, epoch: int) -> Tensor:
    """Samples [N] in the order in which they are packed, with those of equal length in the epoch's order."""
    count = len(packs.lengths)
    return packs.ordered(torch.randperm(count, generator=Randomness(seed).generator("packs", epoch)))


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    """Packs samples into rows: returns the row of each length.

    Args:
        lengths: tokens of each sample, descending.
        capacity: largest number of tokens in a row.
    """
    room: dict[int, list[int]] = {}  # free tokens -> rows
    left = 0  # bit n: a row with n free tokens exists
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
    """Position ids [sum of lengths] int64 of a packed row: each token's place in its own conversation."""
    return torch.cat([torch.arange(length) for length in lengths])
