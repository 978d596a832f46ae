"""Mixtures of sources: how often an epoch uses the rows of each, and which of their tags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mm_core.builtin.configs.data import CaptionTags
from mm_core.contracts import Randomness


class Mixture:
    """The samples of an epoch over several sources with weights: 2 is each row twice, 0.5 half of the rows.

    An epoch has the same number of samples every time, and each source keeps its places in it. The epoch
    decides which rows a fraction takes: all are used in turn.

    Args:
        counts: rows of each source.
        weights: uses of a row in an epoch, for each source.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float]) -> None:
        self.counts, self.weights = tuple(counts), tuple(weights)

    def __len__(self) -> int:
        return len(self.rows())

    def rows(self, epoch: int = 0) -> Tensor:
        """The number of the row of each sample of an epoch, counted over all sources: int64 [N]."""
        return _rows(self.counts, self.weights, epoch)


@lru_cache(maxsize=4)
def _rows(counts: tuple[int, ...], weights: tuple[float, ...], epoch: int) -> Tensor:
    parts: list[Tensor] = []
    first = 0
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        own = torch.arange(first, first + count)
        whole = int(weight)
        part = round((weight - whole) * count)
        turn = torch.randperm(count, generator=Randomness(0).generator("source", number))
        drawn = turn[(epoch * part + torch.arange(part)) % max(count, 1)]
        parts += [own.repeat(whole), own[drawn.sort().values]]
        first += count
    return torch.cat(parts)


def drawn_tags(text: str, tags: CaptionTags, rng: Randomness) -> str:
    """A caption of tags with those after the first `keep` dropped and shuffled, drawn from `rng`."""
    parts = [part.strip() for part in text.split(tags.separator)]
    kept, rest = parts[: tags.keep], parts[tags.keep :]
    generator = rng.generator("tags")
    chance: Tensor = torch.rand(len(rest), generator=generator)
    places = torch.randperm(len(rest), generator=generator) if tags.shuffle else torch.arange(len(rest))
    return f"{tags.separator} ".join(
        kept + [rest[place] for place in places.tolist() if chance[place] >= tags.drop]
    )
