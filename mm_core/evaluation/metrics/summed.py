"""What metrics share: a vector of sums, and only that leaves a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Batch, Clip, Evaluation


class SummedMetric:
    """A metric that sums over the rows of batches, or over sampled clips. width: how many sums it keeps."""

    width = 2

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets what was seen."""
        self._sums = torch.zeros(self.width, dtype=torch.float64)

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch, which a metric of clips does not look at."""

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Adds sampled clips, in which a metric of rows finds nothing to compare."""

    def sums(self) -> Tensor:
        """[n] float64."""
        return self._sums.clone()


def mean(name: str, sums: Tensor) -> Mapping[str, float]:
    """The mean under its name, of [2]: how many there were, and their sum; {} without any."""
    count, total = sums.tolist()
    return {name: total / count} if count else {}
