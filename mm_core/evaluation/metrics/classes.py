"""Metrics of labels that are classes or tokens."""

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

_HINT = "take a metric that fits the task: these are of labels that are classes or tokens"

_F1_HINT = "the F1 score is of rows with one class, or with several yes or no; accuracy is of tokens too"


class Accuracy(SummedMetric):
    """The share of labels that were predicted: of rows, or of tokens whose label is not -100."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch. ContractError when the task gives no predictions."""
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
    """exp of the mean cross entropy over the labels that count, in nats."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch. ContractError where the loss is no cross entropy of labels."""
        needed_outputs(evaluation, "perplexity", ("predictions", "labels"), _HINT)
        for place, values in enumerate((evaluation.weights, evaluation.sums["loss"])):
            self._sums[place] += values[counting(batch, values)].double().sum().cpu()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`perplexity`, infinite where its exponent overflows; {} without labels."""
        try:
            return {name: math.exp(loss) for name, loss in mean("perplexity", sums).items()}
        except OverflowError:
            return {"perplexity": math.inf}


class F1(SummedMetric):
    """The F1 score of rows of one class, or of several yes or no (yes: a logit above 0).

    F1 of a class = 2 TP / (2 TP + FP + FN). Classes that neither labels nor predictions name do not count.

    Args:
        average: `macro`, the mean over classes; `weighted`, weighted by their labels; `micro`, of the counts
            summed over classes, which for rows of one class is the accuracy.
    """

    width = 3

    def __init__(self, average: Average) -> None:
        self.average = average
        super().__init__()

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch. ContractError when the task gives no logits [B,K] of classes."""
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
                "the F1 score is of classes, and the labels are numbers",
                where="validation.metrics: f1",
                accepted="labels [B] of classes, or [B,K] of 0 and 1",
            )
        # [3K]: of each class what was right, predicted and labelled; [3], for any class, before a batch.
        counts = torch.stack([(found & wanted).sum(0), found.sum(0), wanted.sum(0)]).cpu().double()
        self._sums = (self._sums.view(3, -1) + counts).flatten()

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`f1_macro`, `f1_micro` or `f1_weighted`, 0 to 1; {} without rows."""
        right, predicted, labelled = sums.reshape(3, -1)
        if not sums.sum():
            return {}
        return {f"f1_{self.average}": f1_score(right, predicted, labelled, self.average)}


def f1_score(right: Tensor, predicted: Tensor, labelled: Tensor, average: Average) -> float:
    """The averaged F1 score from counts by class [K]: predicted and labelled alike, predicted, labelled."""
    if average == "micro":
        right, predicted, labelled = (counts.sum()[None] for counts in (right, predicted, labelled))
    there = predicted + labelled > 0
    scores = 2 * right[there] / (predicted + labelled)[there]
    if average == "weighted":
        return float((scores * labelled[there]).sum() / labelled.sum()) if labelled.sum() else 0.0
    return float(scores.mean())


def counting(batch: Batch, rows: Tensor) -> Tensor:
    """[B]: which rows count, where the rows are."""
    return (batch.sample_weights > 0).to(rows.device)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels.long(), classes).bool()
