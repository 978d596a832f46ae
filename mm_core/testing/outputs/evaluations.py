"""Evaluations of every sort that the core's tasks return, for tests of metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from mm_core.contracts import (
    IGNORED_LABEL,
    Batch,
    Clip,
    Evaluation,
    Randomness,
    SampleKey,
    TextBatch,
    VideoTextBatch,
)
from mm_core.testing.data.reading import equal

_ROWS, _CLASSES, _TOKENS = 7, 3, 5
_LABELS = (0, 1, 2, 0, 1, 2, 2)
_PREDICTED = (0, 1, 1, 0, 2, 2, 0)
_TEXTS = ("B", "1", "<think>one?</think> no", "", "0.52", "Zwölf grüne", "red")
_REFERENCES = (("B",), ("1", "one"), ("No", "never"), ("yes",), ("0.5",), ("zwölf grüne",), ("blue", "red!"))


@dataclass(frozen=True)
class Source:
    """Rows that a metric is given.

    Attributes:
        name: what they are.
        batch: the batch that was evaluated; None: they are sampled clips.
        given: what was computed for the batch, or the clips.
    """

    name: str
    batch: Batch | None
    given: Evaluation | list[Clip]

    @property
    def rows(self) -> range:
        """The numbers of the rows."""
        return range(len(self.given if isinstance(self.given, list) else self.given.weights))

    def give(self, metric: Any, rows: Sequence[int], filling: Sequence[int] = ()) -> bool:
        """Gives copies of rows to a metric, and of others that only fill the batch; returns whether it leaves
        them as they were."""
        given, kept = (self._copies([*rows, *filling], len(rows)) for _ in range(2))
        (metric.sampled if self.batch is None else metric.batch)(*given)
        return equal(given, kept)

    def _copies(self, rows: list[int], count: int) -> list[Any]:
        if self.batch is None:  # no clip that is sampled fills a batch
            return [_rows_of(deepcopy(self.given), rows[:count])]
        chosen = _rows_of(self.batch, rows)
        chosen.sample_weights[count:] = 0
        return [chosen, _rows_of(self.given, rows)]


def sources(examples: Sequence[tuple[Batch, Evaluation]] = ()) -> list[Source]:
    """The rows of each sort: evaluated ones, then sampled clips.

    Args:
        examples: the metric's own, instead of those of the core's tasks.
    """
    evaluated = {f"example {number}": each for number, each in enumerate(examples)}
    evaluated = evaluated or {
        "rows with classes": _classes(),
        "rows with yes/no labels": _yes_no(),
        "tokens with answers": _tokens(),
        "held-out clips": _held_out_clips(),
    }
    return [
        *(Source(name, *each) for name, each in evaluated.items()),
        Source("sampled clips", None, sampled_clips()),
    ]


def sampled_clips() -> list[Clip]:
    """Four different clips: 3 to 6 frames of 16x16 pixels, with prompts."""
    rng = Randomness(11)
    prompts = ("a red circle", "Zwölf grüne Quadrate", 'a "quoted"\nprompt, with 100 %', "")
    pixels = [rng.normal((3, 3 + number, 16, 16), "clip", number).clamp(-1, 1) for number in range(4)]
    return [Clip(each, 8.0, prompt) for each, prompt in zip(pixels, prompts, strict=True)]


def _rows_of(value: Any, rows: Sequence[int]) -> Any:
    """A copy of a batch or evaluation with some of its rows."""
    if isinstance(value, torch.Tensor):
        return value[rows]
    if isinstance(value, list) and value:
        return [value[row] for row in rows]
    if isinstance(value, dict):
        return {name: _rows_of(each, rows) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {field.name: _rows_of(getattr(value, field.name), rows) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **own)
    return value


def _base() -> tuple[list[SampleKey], torch.Tensor, list[str]]:
    keys = [SampleKey(0, row) for row in range(_ROWS)]
    return keys, torch.ones(_ROWS), [f"row {row}" for row in range(_ROWS)]


def _losses(*path: str) -> torch.Tensor:
    return Randomness(5).normal((_ROWS,), *path).abs()


def _text_batch(labels: torch.Tensor) -> TextBatch:
    ids = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return TextBatch(*_base(), inputs, [1] * _ROWS, references=list(_REFERENCES))


def _classes() -> tuple[Batch, Evaluation]:
    labels, predicted = torch.tensor(_LABELS), torch.tensor(_PREDICTED)
    logits = torch.nn.functional.one_hot(predicted, _CLASSES) * 2.0 - 0.5
    outputs = {"predictions": predicted, "labels": labels, "logits": logits}
    return _text_batch(labels), Evaluation({"loss": _losses("classes")}, torch.ones(_ROWS), outputs)


def _yes_no() -> tuple[Batch, Evaluation]:
    labels = torch.nn.functional.one_hot(torch.tensor(_LABELS), _CLASSES).float()
    outputs = {"logits": Randomness(5).normal((_ROWS, _CLASSES), "logits"), "labels": labels}
    return _text_batch(labels), Evaluation({"loss": _losses("yes")}, torch.ones(_ROWS), outputs)


def _tokens() -> tuple[Batch, Evaluation]:
    labels = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % _CLASSES
    counts = torch.arange(_ROWS) % _TOKENS + 1
    ignored = torch.arange(_TOKENS) >= counts[:, None]
    predicted = torch.where(torch.arange(_TOKENS) % 2 == 0, labels, 0)
    labels = labels.masked_fill(ignored, IGNORED_LABEL)
    outputs = {"predictions": predicted, "labels": labels}
    losses = {"loss": _losses("tokens") * counts}
    answers = list(_TEXTS), list(_REFERENCES)
    return _text_batch(labels), Evaluation(losses, counts.float(), outputs, *answers)


def _held_out_clips() -> tuple[Batch, Evaluation]:
    rng = Randomness(5)
    pixels = rng.normal((_ROWS, 3, 4, 8, 8), "pixels").clamp(-1, 1)
    batch = VideoTextBatch(*_base(), pixels, [f"a caption {row}" for row in range(_ROWS)])
    clean = rng.normal((_ROWS, 4, 2, 4, 4), "clean")
    # Errors grow with the row: a mean of the rows' own figures is another one than that of all rows.
    scale = torch.linspace(0.1, 1, _ROWS).view(-1, 1, 1, 1, 1)
    outputs = {"clean": clean, "estimate": clean + scale * rng.normal(clean.shape, "error")}
    losses = {"loss": _losses("clips"), "loss_at/0.5": _losses("clips", "middle")}
    return batch, Evaluation(losses, torch.ones(_ROWS), outputs)
