"""The metric `recall_by_class`: recall of each class, exact over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Batch, Clip, Evaluation


class RecallByClass:
    """Recall of each class, `recall/<name>`: share of its rows that the model classifies right. Satisfies
    `Metric`.

    Args:
        classes: names of the classes, in the order of their numbers.
    """

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """Clears the counts before a new evaluation."""
        self._found = torch.zeros(2, len(self.classes), dtype=torch.float64)  # right, all

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Counts the right rows of a batch by class. Rows of weight 0 only fill the batch, and are
        ignored."""
        counts = batch.sample_weights.cpu() > 0
        labels = evaluation.outputs["labels"].cpu()[counts]
        right = evaluation.outputs["predictions"].cpu()[counts] == labels
        self._found[0] += labels[right].bincount(minlength=len(self.classes))
        self._found[1] += labels.bincount(minlength=len(self.classes))

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Does nothing: classifiers sample no clips."""

    def sums(self) -> Tensor:
        """This rank's counts; mm_core adds those of all ranks."""
        return self._found.flatten()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """Recall of each class that has rows, from the counts of all ranks."""
        right, all_rows = sums.view(2, -1).tolist()
        return {
            f"recall/{name}": found / rows
            for name, found, rows in zip(self.classes, right, all_rows, strict=True)
            if rows
        }
