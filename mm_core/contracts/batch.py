"""Typed batches, losses and requests, which data, task, engine and loop exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of tokens that are not learnt, as in Transformers' losses."""


class SampleKey(NamedTuple):
    """Epoch and index of a sample in a batch: the seed path of everything random about it."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a key


@dataclass(frozen=True)
class FailureRecord:
    """A sample of a batch that could not be read, or a part of one (see `PartsError`).

    Attributes:
        id: name of the sample for reports (a path).
        index: the sample's index in the dataset.
        reason: the error message.
        part: number of the unreadable part among all parts of the dataset; None: the complete sample.
        parts: number of parts of the sample.
        replaced: another sample takes its place; otherwise the sample is used without this part.
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

    Attributes:
        keys: one SampleKey per sample; with the run's seed it determines all randomness of the sample.
        sample_weights: [B] float32; 0 for samples that only fill up an incomplete batch (all ranks must run
            the same modules) and do not count.
        ids: names of the samples for reports (a path, a row).
        failures: samples, and parts of them, that could not be read while this batch was built (set by the
            loader).
    """

    keys: list[SampleKey]
    sample_weights: Tensor
    ids: list[str]
    failures: list[FailureRecord] = field(default_factory=list, kw_only=True)

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Moves every tensor of the batch to a device, except `sample_weights`, which stays on the CPU."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking), "sample_weights")

    def pin_memory(self) -> Self:
        """Copies every tensor of the batch to page-locked memory (called by torch's DataLoader)."""
        return self._changed(lambda tensor: tensor.pin_memory())

    def _changed(self, change: Callable[[Tensor], Tensor], kept: str = "") -> Self:
        """A copy of the batch with its tensors changed, in dicts at any depth too."""
        names = (f.name for f in dataclasses.fields(self) if f.name != kept)
        return dataclasses.replace(self, **{name: _within(change, getattr(self, name)) for name in names})


@dataclass(frozen=True)
class Ragged:
    """A field whose rows have other numbers of tensors, of other sizes, such as pictures of their own size.

    Attributes:
        rows: of each sample, its tensors: pixels [3,1,Y,X].
    """

    rows: tuple[tuple[Tensor, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Ragged:
        """The same with each tensor changed."""
        return Ragged(tuple(tuple(map(change, row)) for row in self.rows))

    def floats(self) -> Ragged:
        """Pixels uint8 as floats from -1 to 1."""
        return self.changed(lambda one: _as_floats(one[None], None)[0] if one.dtype == torch.uint8 else one)

    @classmethod
    def of_pictures(cls, rows: Sequence[Sequence[Tensor]]) -> Ragged:
        """Pictures [3,Y,X], or [3,1,Y,X], of each sample."""
        return cls(tuple(tuple(one if one.dim() == 4 else one[:, None] for one in row) for row in rows))


def _within(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Ragged):
        return value.changed(change)
    return {k: _within(change, v) for k, v in value.items()} if isinstance(value, dict) else value


@dataclass
class VideoTextBatch(Batch):
    """A micro-batch of clips and captions.

    Attributes:
        pixels: [B,3,F,Y,X] float32 in [-1, 1], or uint8 levels, of which `to` makes these floats; None where
            `moments` and `clip_size` are given.
        captions: B strings.
        text_ids: [B,L] int64 tokens, set by the task's batch transform in the data worker.
        text_mask: [B,L] bool, false for padding; set like `text_ids`.
        tokens: named tensors of a tokenizer that returns them, in the place of both; set like them.
        fps: [B] float32, frames per second of each clip, for predictors whose forward names it; None: not
            known.
        moments: [B,...], what the autoencoder's posterior of the clips stores (see `SupportsPosterior`), in
            place of pixels.
        clip_size: frames, height and width (F,Y,X) of clips without pixels.
        levels: [3,256] float32, what each level of uint8 pixels stands for in red, green and blue; None: -1
            (black) to 1 (white).
        cut: tokens of each caption that is longer than the text encoder takes, before it was cut.
        fields: what the samples have beside clip and caption, by name: pixels [B,3,F,Y,X] as those of the
            clips, pictures of their own size (`Ragged`), numbers [B,...], or lists of B other values.
    """

    pixels: Tensor | None
    captions: list[str]
    text_ids: Tensor | None = None
    text_mask: Tensor | None = None
    fps: Tensor | None = None
    moments: Tensor | None = None
    clip_size: tuple[int, int, int] | None = None
    levels: Tensor | None = None
    cut: Sequence[int] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pixels is None:
            if self.moments is None or self.clip_size is None:
                raise ValueError("a batch without pixels needs `moments` and `clip_size`")
        elif self.pixels.dim() != 5 or self.pixels.shape[1] != 3:
            raise ValueError(f"pixels must have the shape [B,3,F,Y,X], not {[*self.pixels.shape]}")

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Moves the batch to a device, where uint8 pixels become the floats that they stand for."""
        moved = super().to(device, non_blocking=non_blocking)
        floats: dict[str, Any] = {
            name: value.floats() if isinstance(value, Ragged) else _as_floats(value, moved.levels)
            for name, value in moved.fields.items()
            if isinstance(value, Ragged) or _is_levels(value)
        }
        if not floats and not _is_levels(moved.pixels):
            return moved
        clips = _as_floats(moved.pixels, moved.levels) if _is_levels(moved.pixels) else moved.pixels
        return dataclasses.replace(moved, pixels=clips, fields={**moved.fields, **floats}, levels=None)

    def pixel_fields(self) -> Iterator[tuple[str, Iterable[Sequence[Tensor]]]]:
        """The pixels of clips and of further fields by name, those of each sample."""
        for name, value in {"pixels": self.pixels, **self.fields}.items():
            if isinstance(value, Ragged):
                yield name, value.rows
            elif isinstance(value, Tensor) and value.dim() == 5:
                yield name, ([one] for one in value)

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width (F,Y,X) of the clips."""
        if self.pixels is None:
            assert self.clip_size is not None
            return self.clip_size
        frames, height, width = self.pixels.shape[2:]
        return frames, height, width

    @property
    def device(self) -> torch.device:
        """Where the clips are."""
        return next(clips.device for clips in (self.pixels, self.moments) if clips is not None)


def _is_levels(value: object) -> TypeGuard[Tensor]:
    """Whether this is uint8 pixels of clips."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 5


def _as_floats(pixels: Tensor, levels: Tensor | None) -> Tensor:
    """The floats that uint8 pixels stand for."""
    if levels is None and pixels.device.type == "cpu":  # the table's bits, with less work
        return pixels.float().div_(127.5).sub_(1)
    return _looked_up(pixels, _default_levels(pixels.device) if levels is None else levels)


@cache
def _default_levels(device: torch.device) -> Tensor:
    """The floats from -1 to 1 of 256 levels, [3,256]. They are made on the CPU: devices round otherwise."""
    return (torch.arange(256, dtype=torch.float32) / 127.5 - 1).expand(3, 256).contiguous().to(device)


def _looked_up(pixels: Tensor, levels: Tensor) -> Tensor:
    """Floats [B,3,F,Y,X] of uint8 pixels by a table [3,256]."""
    found = torch.empty(pixels.shape, dtype=levels.dtype, device=pixels.device)
    for clip, out in zip(pixels, found, strict=True):
        for plane, table, values in zip(clip, levels, out, strict=True):
            torch.index_select(table, 0, plane.reshape(-1).int(), out=values.view(-1))
    return found


Features = dict[str, Tensor]
"""What frozen components compute of one sample, or of one text: tensors by name, without the batch."""


@dataclass
class FeatureBatch(Batch):
    """A micro-batch of samples whose features come from the feature cache (see `SupportsCache`).

    Attributes:
        features: `part.name` -> [B,...], padded at the end with zeros (false) where rows differ; of int64
            features a list of B plain values, which stays on the CPU.
        texts: the features of the texts of `CachePart.texts`, one row each, named as above.
    """

    features: dict[str, Any]
    texts: dict[str, dict[str, Any]]

    @property
    def device(self) -> torch.device:
        """Where the features are."""
        return next(value.device for value in self.features.values() if isinstance(value, Tensor))


@dataclass
class TextBatch(Batch):
    """A micro-batch of inputs for a Transformers model: tokens, and other tensors such as images.

    Attributes:
        inputs: padded tensors by the argument names of the model's `forward`, including `labels`: [B] or
            [B,K] for rows, or [B,L] int64 for tokens, -100 where nothing is learnt.
        label_weights: [B,L] float32, the weight of each token's label in the loss; None: all are 1.
        counts: number of labels in the loss of each row, or the sum of their weights; set by the task's batch
            transform in the worker.
        tokens: number of tokens in all rows, without padding; set like `counts`.
        references: for each row, the texts that an evaluation accepts as right answers; () or None: the text
            of the row's last labels.
        pieces: tokens of each conversation that shares a row, of every row; None: rows are not packed.
        sections: of a packed row, by the names of its tensors without a value for each token (of pictures):
            the dimension along which those of its pieces follow each other, and the length of each there.
    """

    inputs: dict[str, Tensor]
    counts: Sequence[float] | None = None
    tokens: int = 0
    references: list[tuple[str, ...]] | None = None
    pieces: list[list[int]] | None = None
    sections: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    label_weights: Tensor | None = None


@dataclass
class Loss:
    """The loss of a micro-batch as a sum with its total weight, so that means over any ranks are exact.

    Attributes:
        total: scalar tensor with a graph: the weighted SUM over the micro-batch.
        weight: equals `Task.weight(batch)`.
        metrics: further detached scalar tensors, each a weighted sum too (the logger divides).
        bins: [2, n] float32, detached: loss and weight in each bin of `Task.bins`; None if the task has no
            bins.
        tokens: number of tokens (patches of latents) that the trained network has processed.
        flops: floating-point operations of forward and backward, if the network declares them; else 0.
    """

    total: Tensor
    weight: float
    metrics: dict[str, Tensor] = field(default_factory=dict)
    bins: Tensor | None = None
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class Bins:
    """A scale by which a task's training loss is also reported in bins, such as the noise level.

    Attributes:
        name: name of the scale ("sigma").
        edges: n + 1 increasing numbers.
        declared: [n] the share of the training weight that each bin should have according to the config.
    """

    name: str
    edges: tuple[float, ...]
    declared: tuple[float, ...]


@dataclass
class Evaluation:
    """A task's results for one batch of held-out samples, row by row, without gradients.

    Attributes:
        sums: name -> [B] float32, each row's summed value, including "loss". The names are the same for every
            batch.
        weights: [B] float32, the divisor of `sums` in a mean: 1 per row, or its number of tokens. Rows whose
            `Batch.sample_weights` is 0 do not count, whatever their weight here.
        outputs: name -> [B,...] tensors for metrics. `predictions` and `labels` are [B], or [B,L] with the
            label -100 where nothing counts; `logits` are [B,K].
        texts: the task's answer to each row, if it answers in words.
        references: the right answers for each row; one of them is enough.
    """

    sums: dict[str, Tensor]
    weights: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)
    texts: list[str] | None = None
    references: list[tuple[str, ...]] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """A request to sample clips. None: the task's default.

    Attributes:
        prompts: one clip each.
        negative_prompt: text of the unconditional branch of guidance ("" by default).
        seed: the noise of clip i depends only on (seed, first + i).
        steps: solver steps.
        guidance: guidance scale, or one per expert of the predictor, from noise to clean. It is that of
            classifier-free guidance (off up to 1), or the condition `guidance` of a predictor that takes it.
        num_frames: F, frames per clip.
        height: Y in pixels.
        width: X in pixels.
        fps: frames per second.
        first: number of the first prompt, when several ranks share a list.
        images: conditioning frames of each clip, uint8 [3,Y,X] of any size: its first, or its first and its
            last; (): no clip has any.
        inputs: further fields of the predictor's inputs (see `Input`) by name, one value for each clip: an
            image uint8 [3,Y,X] or a clip uint8 [3,F,Y,X] of any size, a number, or a tuple of images for an
            input of several (none where it is not named).
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
    inputs: Mapping[str, tuple[Tensor | float | tuple[Tensor, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Clip:
    """A clip sampled by a task."""

    pixels: Tensor  # [3,F,Y,X] float32 in [-1, 1] on the CPU
    fps: float  # frames per second
    prompt: str
    extras: dict[str, Any] = field(default_factory=dict)
