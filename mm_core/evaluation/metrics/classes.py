"""Metrics for labels that are classes or tokens: accuracy, perplexity, F1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mm_core.contracts import IGNORED_LABEL, Batch, Evaluation
from mm_core.errors import ContractError
from mm_core.evaluation.metrics.needs import needed_outputs
from mm_core.evaluation.metrics.summed import SummedMetric, mean

Average = Literal["macro", "micro", "weighted"]

_HINT = "choose a metric that fits the task: this one is for labels that are classes or tokens"

_F1_HINT = "F1 needs rows with one class or with several yes/no labels; use accuracy for tokens"


class Accuracy(SummedMetric):
    """The metric `accuracy`: share of labels predicted correctly, over rows, or tokens with a label."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric.

        Raises:
            ContractError: the task's evaluation contains no predictions.
        """
        names = ("predictions", "labels")
        predicted, labels = (
            rows[counting(batch, rows)] for rows in needed_outputs(evaluation, "accuracy", names, _HINT)
        )
        known = labels != IGNORED_LABEL
        self._sums[0] += float(known.sum())
        self._sums[1] += float(((predicted == labels) & known).sum())

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`accuracy`, 0 to 1; {} without labels."""
        return mean("accuracy", sums)


class Perplexity(SummedMetric):
    """The metric `perplexity`: exp of the mean cross entropy over labels, in nats."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric.

        Raises:
            ContractError: the loss is not a cross entropy of labels.
        """
        needed_outputs(evaluation, "perplexity", ("predictions", "labels"), _HINT)
        for place, values in enumerate((evaluation.weights, evaluation.sums["loss"])):
            self._sums[place] += values[counting(batch, values)].double().sum().cpu()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`perplexity`, infinite if its exponent overflows; {} without labels."""
        try:
            return {name: math.exp(loss) for name, loss in mean("perplexity", sums).items()}
        except OverflowError:
            return {"perplexity": math.inf}


class F1(SummedMetric):
    """The metric `f1`: F1 score for rows with one class, or with several yes/no labels (yes: logit above 0).

    F1 of a class = 2 TP / (2 TP + FP + FN). Classes without labels and predictions do not count.

    Args:
        average: `macro`, the mean over classes; `weighted`, weighted by the number of labels; `micro`, from
            counts summed over classes, which equals the accuracy for rows with one class.
    """

    width = 3

    def __init__(self, average: Average) -> None:
        self.average = average
        super().__init__()

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric.

        Raises:
            ContractError: the task's evaluation contains no logits [B,K] of classes.
        """
        logits, labels = needed_outputs(evaluation, "f1", ("logits", "labels"), _F1_HINT)
        classes = logits.shape[1]
        if labels.dim() == 1 and "predictions" in evaluation.outputs:
            known = counting(batch, labels) & (labels != IGNORED_LABEL)
            found = _one_hot(evaluation.outputs["predictions"][known], classes)
            wanted = _one_hot(labels[known], classes)
        elif labels.dim() == 2 and bool(((labels == 0) | (labels == 1)).all()):
            rows = counting(batch, labels)
            found, wanted = logits[rows] > 0, labels[rows] > 0
        else:
            raise ContractError(
                "the F1 score needs classes, but the labels are numbers",
                where="validation.metrics: f1",
                accepted="labels [B] of classes, or [B,K] of 0 and 1",
                hint="remove f1 from validation.metrics",
            )
        # [3K]: for each class the correct predictions, all predictions, all labels; [3] before any batch.
        counts = torch.stack([(found & wanted).sum(0), found.sum(0), wanted.sum(0)]).cpu().double()
        self._sums = (self._sums.view(3, -1) + counts).flatten()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`f1_macro`, `f1_micro` or `f1_weighted`, 0 to 1; {} without rows."""
        right, predicted, labelled = sums.reshape(3, -1)
        if not sums.sum():
            return {}
        return {f"f1_{self.average}": f1_score(right, predicted, labelled, self.average)}


def f1_score(right: Tensor, predicted: Tensor, labelled: Tensor, average: Average) -> float:
    """Averaged F1 score, from counts for each class.

    Args:
        right: [K], correct predictions.
        predicted: [K], all predictions.
        labelled: [K], all labels.
        average: over classes.
    """
    if average == "micro":
        right, predicted, labelled = (counts.sum()[None] for counts in (right, predicted, labelled))
    there = predicted + labelled > 0
    scores = 2 * right[there] / (predicted + labelled)[there]
    if average == "weighted":
        return float((scores * labelled[there]).sum() / labelled.sum()) if labelled.sum() else 0.0
    return float(scores.mean())


def counting(batch: Batch, rows: Tensor) -> Tensor:
    """Which rows of an evaluation count, bool [B], on the device of `rows`."""
    return (batch.sample_weights > 0).to(rows.device)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels.long(), classes).bool()
