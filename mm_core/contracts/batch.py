"""Typed batches and losses: what moves between data, task, engine and loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class SampleKey(NamedTuple):
    """One draw of one sample: the seed path of everything random about it."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a key


IGNORED_LABEL = -100
"""The label of what is not learnt, in Transformers' losses."""


@dataclass(frozen=True)
class FailureRecord:
    """A sample that could not be read, or a part of one (see `PartsError`).

    id: what a person would look for (a path). index: the sample's place in the dataset. reason: a sentence.
    part: its number among all parts of the dataset; None: the sample as a whole. parts: how many the sample
    has. replaced: another sample stands in for it; else it does without this part.
    """

    id: str
    index: int
    reason: str
    part: int | None = None
    parts: int = 1
    replaced: bool = True


@dataclass
class Batch:
    """A micro-batch. Subclasses add the tensors of their modality.

    keys: one SampleKey a sample; with the run's seed it determines all of the sample's randomness.
    sample_weights: [B] float32; 0 for samples that only fill up a ragged batch (they cost a forward, so
        that all ranks run the same modules, and count for nothing).
    ids: what a person would call each sample (a path, a row), for reports.
    failures: samples, and parts of them, that could not be read while this batch was put together (set by
        the loader).
    """

    keys: list[SampleKey]
    sample_weights: Tensor
    ids: list[str]
    failures: list[FailureRecord] = field(default_factory=list, kw_only=True)

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same batch with every tensor on `device`, except `sample_weights`, which stays on CPU."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking), "sample_weights")

    def pin_memory(self) -> Self:
        """The same batch with every tensor in page-locked memory (called by torch's DataLoader)."""
        return self._changed(lambda tensor: tensor.pin_memory())

    def _changed(self, change: Callable[[Tensor], Tensor], kept: str = "") -> Self:
        """The same batch with its tensors changed, those in mappings by name among them."""
        changed: dict[str, Any] = {}
        for name in (f.name for f in dataclasses.fields(self) if f.name != kept):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, dict):
                changed[name] = {k: change(v) if isinstance(v, Tensor) else v for k, v in value.items()}
        return dataclasses.replace(self, **changed)


@dataclass
class VideoTextBatch(Batch):
    """Clips and captions.

    pixels: [B,3,F,Y,X] float32 in [-1, 1].
    captions: B strings.
    text_ids, text_mask: [B,L] int64 and bool, filled by the task's batch transform in the worker.
    """

    pixels: Tensor
    captions: list[str]
    text_ids: Tensor | None = None
    text_mask: Tensor | None = None


@dataclass
class TextBatch(Batch):
    """What a Transformers model takes: tokens, and tensors of images or others beside them.

    inputs: tensors by the names that the model's `forward` has for them, padded, with `labels` among them:
        [B] or [B,K] of rows, or [B,L] int64 of tokens, -100 where there is nothing to learn.
    counts: of each row, how many labels its loss is over. tokens: of all rows, without padding. Both are
        filled by the task's batch transform in the worker.
    references: of each row, the answers in words that an evaluation takes for right; () of a row, or None:
        those of its last labels.
    """

    inputs: dict[str, Tensor]
    counts: list[int] | None = None
    tokens: int = 0
    references: list[tuple[str, ...]] | None = None


@dataclass
class Loss:
    """A loss as a sum and the weight that it is a sum over, so that means are exact anywhere.

    total: scalar tensor with a graph: the weighted SUM over the micro-batch.
    weight: equals `Task.weight(batch)`.
    metrics: further detached scalar tensors, each also a weighted sum (the logger divides).
    bins: [2, n] float32, detached: the loss and the weight that fell into each bin of `Task.bins`;
        None where the task has no bins.
    tokens: what the trained network has processed, in its own tokens (patches of latents).
    flops: operations of its forward and backward, where the network says them; else 0.
    """

    total: Tensor
    weight: float
    metrics: dict[str, Tensor] = field(default_factory=dict)
    bins: Tensor | None = None
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class Bins:
    """A scale along which the training loss is also shown, such as the noise level.

    name: of the scale ("sigma"). edges: n + 1 rising numbers. declared: [n] the share of the training
    weight that the configuration says should fall into each bin.
    """

    name: str
    edges: tuple[float, ...]
    declared: tuple[float, ...]


@dataclass
class Evaluation:
    """What a task says of one batch of held-out samples, row by row, without gradients.

    sums: name -> [B] float32, each row's summed value; "loss" is one of them. The names are the same
        for every batch.
    weights: [B] float32, what a mean divides the sums by: 1 a row, or its number of tokens.
        Rows whose `Batch.sample_weights` is 0 count for nothing, whatever stands here.
    outputs: name -> [B,...] tensors that metric plugins may look at. `predictions` and `labels` are [B], or
        [B,L] with the label -100 where nothing counts; `logits` are [B,K].
    texts: what the task says of each row in words, where it does. references: of each row, what would have
        been right; any of them.
    """

    sums: dict[str, Tensor]
    weights: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)
    texts: list[str] | None = None
    references: list[tuple[str, ...]] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """What to generate. None leaves a value to the task's own default.

    prompts: one clip each. negative_prompt: the unconditional branch of guidance ("" by default).
    seed: noise of clip i comes from (seed, first + i) alone. first: number of the first prompt, where
    several ranks share a list. steps: solver steps. guidance: classifier-free guidance scale (up to 1 there
    is none), or one for each expert of the predictor, from noise to clean. num_frames, height, width: F, Y,
    X in pixels. fps: 1/s. images: frames that each clip is given, uint8 [3,Y,X] of any size: its first one,
    or its first and its last; () gives none to any.
    """

    prompts: tuple[str, ...]
    negative_prompt: str = ""
    seed: int = 0
    steps: int | None = None
    guidance: float | tuple[float, ...] | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    first: int = 0
    images: tuple[tuple[Tensor, ...], ...] = ()


@dataclass(frozen=True)
class Clip:
    """A generated clip: pixels [3,F,Y,X] float32 in [-1, 1] on CPU, frames a second, its prompt."""

    pixels: Tensor
    fps: float
    prompt: str
    extras: dict[str, Any] = field(default_factory=dict)
