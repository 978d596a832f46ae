"""Metrics for generated text: exact match and ANLS."""

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
    """A metric for generated text: the mean over rows of a score from 0 to 1.

    Thoughts are removed from the texts first, see `without_thought`.

    Args:
        name: of the figure.
        score: compares a text with its references, each of which is correct.
    """

    def __init__(self, name: str, score: Callable[[str, Sequence[str]], float]) -> None:
        self.name, self.score = name, score
        super().__init__()

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric.

        Raises:
            ContractError: the task's evaluation contains no texts.
        """
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
    """The answer without the thoughts of a reasoning model: the text after `</think>`.

    "" if the thought never ends, for example because `max_new_tokens` cut it off.
    """
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer.strip()
    return "" if text.lstrip().startswith("<think>") else text


def exact_match(normalize: Normalize) -> TextMetric:
    """The metric `exact_match`: share of rows whose generated text equals one of the references.

    Args:
        normalize: how texts are normalised before the comparison: `none` strips white space at the ends;
            `case` also ignores case; `squad` uses `squad_normalized`.
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
    """The metric `anls`: average normalized Levenshtein similarity of generated text and references.

    Biten et al., Scene Text Visual Question Answering, ICCV 2019, equation 1;
    https://arxiv.org/abs/1905.13648. Case and the length of white space are ignored.

    Args:
        threshold: normalized distance from which an answer scores 0; 0.5 in the paper.
    """
    return TextMetric("anls", lambda text, references: anls_score(text, references, threshold))


def anls_score(text: str, references: Sequence[str], threshold: float = 0.5) -> float:
    """ANLS metric of one answer: its best similarity to a reference, 0 from the threshold distance on."""
    plain = _plain(text)
    best = max((normalized_similarity(plain, _plain(each)) for each in references), default=0.0)
    return best if 1 - best < threshold else 0.0


def normalized_similarity(text: str, reference: str) -> float:
    """Similarity of two texts for a metric: 1 - edit distance / longer length; 1 for two empty texts."""
    longer = max(len(text), len(reference))
    return 1 - edit_distance(text, reference) / longer if longer else 1.0


def edit_distance(text: str, other: str) -> int:
    """Edit distance of two texts for a metric: the minimum number of characters to insert, delete and replace
    (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for i, character in enumerate(text, start=1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != wanted))
    return row[-1]


def squad_normalized(text: str) -> str:
    """An answer normalised as in SQuAD's metric: lower case, no punctuation, English articles or extra space.

    Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250.
    """
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _plain(re.sub(r"\b(a|an|the)\b", " ", bare))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
