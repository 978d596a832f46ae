"""The base of metrics: a vector of sums, which is all that ranks exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Batch, Clip, Evaluation


class SummedMetric:
    """Base class for metrics that sum over held-out rows, or over sampled clips."""

    width = 2
    """Number of sums."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets the sums of the metric to zero."""
        self._sums = torch.zeros(self.width, dtype=torch.float64)

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric; metrics for clips ignore them."""

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Adds sampled clips to the metric; metrics for rows ignore them."""

    def sums(self) -> Tensor:
        """The sums of the metric on this rank, [n] float64."""
        return self._sums.clone()


def mean(name: str, sums: Tensor) -> Mapping[str, float]:
    """The mean of a metric, under its name, from sums [2] (count, total); {} if the count is 0."""
    count, total = sums.tolist()
    return {name: total / count} if count else {}
