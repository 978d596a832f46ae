"""Metrics of what a model says in words."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mm_core.contracts import Batch, Evaluation
from mm_core.evaluation.metrics.needs import needed_texts
from mm_core.evaluation.metrics.summed import SummedMetric, mean

Normalize = Literal["none", "case", "squad"]


class TextMetric(SummedMetric):
    """The mean over rows of what `score` says of a text and the references that it is held against, any of
    which is right: 0 to 1. The figure is called `name`. Thoughts are left out: see `without_thought`."""

    def __init__(self, name: str, score: Callable[[str, Sequence[str]], float]) -> None:
        self.name, self.score = name, score
        super().__init__()

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch. ContractError when the task gives no words."""
        rows = needed_texts(evaluation, self.name)
        for (text, references), weight in zip(rows, batch.sample_weights.tolist(), strict=True):
            if weight > 0:
                right = [without_thought(each) for each in references]
                score = self.score(without_thought(text), right)
                self._sums += torch.tensor([1.0, score], dtype=torch.float64)

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """The mean, under the metric's name; {} without rows."""
        return mean(self.name, sums)


def without_thought(text: str) -> str:
    """What a model that thinks aloud answers: the text behind `</think>`; "" for a thought that is begun and
    not ended, as one that `max_new_tokens` has cut off."""
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer.strip()
    return "" if text.lstrip().startswith("<think>") else text


def exact_match(normalize: Normalize) -> TextMetric:
    """The share of rows whose text is one of the references.

    Args:
        normalize: before they are compared: `none` strips white space at the ends; `case` also takes upper
            and lower case as one; `squad` as `squad_normalized`.
    """
    ways: dict[str, Callable[[str], str]] = {
        "none": lambda text: text.strip(),
        "case": lambda text: text.strip().casefold(),
        "squad": squad_normalized,
    }
    normalized = ways[normalize]

    def score(text: str, references: Sequence[str]) -> float:
        return float(normalized(text) in {normalized(each) for each in references})

    return TextMetric("exact_match", score)


def anls(threshold: float) -> TextMetric:
    """Average normalized Levenshtein similarity (Biten et al., Scene Text Visual Question Answering, ICCV
    2019, equation 1; https://arxiv.org/abs/1905.13648).

    Upper and lower case are one, and so is white space of any length.

    Args:
        threshold: the normalized distance from which on an answer is worth nothing; the paper's is 0.5.
    """
    return TextMetric("anls", lambda text, references: anls_score(text, references, threshold))


def anls_score(text: str, references: Sequence[str], threshold: float = 0.5) -> float:
    """The best similarity of one answer over the references; 0 where its distance reaches the threshold."""
    said = _plain(text)
    best = max((normalized_similarity(said, _plain(each)) for each in references), default=0.0)
    return best if 1 - best < threshold else 0.0


def normalized_similarity(text: str, reference: str) -> float:
    """1 - distance / length of the longer one, 0 to 1; 1 for two empty texts."""
    longer = max(len(text), len(reference))
    return 1 - edit_distance(text, reference) / longer if longer else 1.0


def edit_distance(text: str, other: str) -> int:
    """The fewest insertions, deletions and substitutions of characters that turn one into the other
    (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for i, character in enumerate(text, start=1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != wanted))
    return row[-1]


def squad_normalized(text: str) -> str:
    """Lower case, without punctuation, English articles and spare white space: how SQuAD compares answers
    (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _plain(re.sub(r"\b(a|an|the)\b", " ", bare))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
