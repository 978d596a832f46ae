"""The recall of each class, exact over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Batch, Clip, Evaluation


class RecallByClass:
    """Figures `recall/<name>`: of the rows of a class, the share that the model finds. Satisfies `Metric`.

    classes: their names, in the order of their numbers.
    """

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """A new evaluation begins."""
        self._found = torch.zeros(2, len(self.classes), dtype=torch.float64)  # right, all

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Rows of weight 0 stand in for others, and count for nothing."""
        counts = batch.sample_weights.cpu() > 0
        labels = evaluation.outputs["labels"].cpu()[counts]
        right = evaluation.outputs["predictions"].cpu()[counts] == labels
        self._found[0] += labels[right].bincount(minlength=len(self.classes))
        self._found[1] += labels.bincount(minlength=len(self.classes))

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Classifiers make no clips."""

    def sums(self) -> Tensor:
        """What this rank has counted: mm_core adds the ranks'."""
        return self._found.flatten()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """A figure for each class that has rows."""
        right, all_rows = sums.view(2, -1).tolist()
        return {
            f"recall/{name}": found / rows
            for name, found, rows in zip(self.classes, right, all_rows, strict=True)
            if rows
        }
