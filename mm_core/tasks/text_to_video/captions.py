"""Captions of a batch as hidden states: tokens, dropped captions, the padding the predictor expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mm_core.contracts import (
    Batch,
    CountingTokenizer,
    DictBatch,
    EncodedText,
    Features,
    TextEncoder,
    Tokenizer,
    Tokens,
    VideoTextBatch,
)
from mm_core.data.cache.samples import stacked
from mm_core.device import copied_to
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.conditions import Conditions, check_returned
from mm_core.tasks.text_to_video.returned_shapes import expect_text

Encoded = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Text states [B,L,D], mask [B,L], and the text encoder's conditions [B,...] that the predictor takes."""


_PAIR = ("ids", "mask")
_NAMES = (("video", "pixels"), ("caption", "captions"))
_CLIP = "`video` [3,F,Y,X] from -1 to 1, and `caption`, or `prompt_ids` and `prompt_mask` [L]"


@dataclass(frozen=True)
class TokenizeCaptions:
    """Fills `text_ids` and `text_mask` of a batch in the data worker; one of plain dicts becomes clips.

    Attributes:
        tokenizer: of the text encoder.
        fields: names that the predictor's inputs read; of plain dicts, nothing else is kept.
    """

    tokenizer: Tokenizer
    fields: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> Batch:
        if isinstance(batch, DictBatch):
            return clips_of(batch, self.tokenizer, self.fields)
        assert isinstance(batch, VideoTextBatch)
        tokens = self.tokenizer(batch.captions)
        cut = cut_captions(self.tokenizer, batch.captions, tokens)
        if isinstance(tokens, Mapping):
            return replace(batch, tokens=dict(tokens), cut=cut)
        return replace(batch, text_ids=tokens[0], text_mask=tokens[1], cut=cut)


def cut_captions(tokenizer: Tokenizer, captions: Sequence[str], tokens: Tokens) -> list[int]:
    """The tokens of each caption that is longer than its mask; only those that fill it are counted again."""
    if not isinstance(tokenizer, CountingTokenizer):
        return []
    full = list(captions)
    if isinstance(tokens, tuple):
        if tokens[1].shape[1] < tokenizer.max_length:
            return []
        full = [text for text, filled in zip(captions, tokens[1].all(1).tolist(), strict=True) if filled]
    counts = tokenizer.token_counts(full) if full else []
    return [count for count in counts if count > tokenizer.max_length]


def clips_of(batch: DictBatch, tokenizer: Tokenizer, fields: Sequence[str] = ()) -> VideoTextBatch:
    """A batch of plain dicts as clips with tokens: their `video` (or `pixels`) and `caption`, or
    `prompt_ids` and `prompt_mask`, `fps` and further `fields` if they have them.

    Raises:
        ContractError: something is missing, or has another shape.
    """
    values = batch.values
    pixels, captions = (values.get(name, values.get(other)) for name, other in _NAMES)
    ids, mask = (values.get(name) for name in ("prompt_ids", "prompt_mask"))
    cut: Sequence[int] = ()
    tokens: Mapping[str, Tensor] = {}
    if captions is not None:
        if not (isinstance(captions, (list, tuple)) and all(isinstance(text, str) for text in captions)):
            raise ContractError("the `caption` of a sample is not a text", where="data", accepted=_CLIP)
        found = tokenizer(captions)
        cut = cut_captions(tokenizer, captions, found)
        tokens, (ids, mask) = (found, (None, None)) if isinstance(found, Mapping) else ({}, found)
    lacks = [names[0] for names, value in zip(_NAMES, (pixels, captions), strict=True) if value is None]
    if ids is not None and mask is not None and lacks == ["caption"]:
        lacks = []
    if lacks or (not tokens and (ids is None or mask is None)):
        raise ContractError(
            f"the samples have no {' and no '.join(map(repr, lacks))}, only {', '.join(values)}",
            where="data",
            accepted=_CLIP,
        )
    if not isinstance(pixels, Tensor) or pixels.dim() != 5 or pixels.shape[1] != 3:
        shape = [*pixels.shape[1:]] if isinstance(pixels, Tensor) else f"a {type(pixels).__name__}"
        raise ContractError(f"the video of a sample is {shape}", where="data", accepted=_CLIP)
    fps = values.get("fps")
    return VideoTextBatch(
        batch.keys,
        batch.sample_weights,
        batch.ids,
        pixels=pixels.float() if pixels.is_floating_point() else pixels,
        captions=[""] * len(batch) if captions is None else [*captions],
        text_ids=None if ids is None else ids.flatten(1).long(),
        text_mask=None if mask is None else mask.flatten(1).bool(),
        fps=None if fps is None else fps.float(),
        cut=cut,
        fields={name: values[name] for name in fields if name in values},
        tokens=dict(tokens),
    )


@dataclass(eq=False)
class Captions:
    """Encodes captions with the task's text encoder.

    Args:
        encoder: the text encoder.
        padding: the predictor's `text_padding`.
        conditions: of the text encoder's conditions, those that the predictor takes are kept.
    """

    encoder: TextEncoder
    padding: str | tuple[str, int]
    conditions: Conditions
    find: Callable[[str], Features | None] | None = field(default=None, init=False)  # see `SupportsCache`
    _empty: dict[str, Tensor] | None = field(default=None, init=False)

    def encoded(self, batch: VideoTextBatch, empty: bool) -> tuple[Encoded, Encoded | None]:
        """The captions of a batch, tokenized or not, on the device of its clips; with `empty` also the empty
        caption, one row. A sharded encoder gathers its weights in each call, so this is one call."""
        ids, mask = batch.text_ids, batch.text_mask
        if batch.tokens:
            tokens = _on(batch.device, batch.tokens)
        elif ids is None or mask is None:
            tokens = self._tokens(batch.captions, batch.device)
        else:
            tokens = _on(batch.device, (ids, mask))
        if not empty:
            return self._encode(tokens), None
        found = self._encode(self._with_empty(tokens))
        return _rows(found, slice(len(batch))), _rows(found, slice(len(batch), None))

    def encoded_texts(self, captions: Sequence[str], device: torch.device) -> Encoded:
        """Text states, mask and conditions of captions given as strings."""
        known = [self.find(caption) for caption in captions] if self.find is not None else [None]
        if None not in known:
            return self.of_features(stacked([{"": row} for row in known if row is not None]), "", device)
        return self._encode(self._tokens(captions, device))

    def _tokens(self, captions: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        return _on(device, self.encoder.tokenizer()(captions))

    def _with_empty(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tokens with a row of the empty caption after them."""
        device = next(iter(tokens.values())).device
        empty = self._empty = _on(device, self._empty or self._tokens([""], device))
        return {name: _joined(own, empty[name]) for name, own in tokens.items()}

    def _encode(self, tokens: Mapping[str, Tensor]) -> Encoded:
        return self._finished(*self._states(tokens))

    def _states(self, tokens: Mapping[str, Tensor]) -> Encoded:
        rows = len(next(iter(tokens.values())))
        encode: Callable[..., EncodedText] = self.encoder.encode
        found = encode(*tokens.values()) if tuple(tokens) == _PAIR else encode(**tokens)
        text, mask, *others = expect_text(found, rows, self.encoder)
        given: Mapping[str, Tensor] = others[0] if others else {}
        check_returned(given, self.encoder, rows)
        return text, mask, given

    def _finished(self, text: Tensor, mask: Tensor, given: Mapping[str, Tensor]) -> Encoded:
        """Hidden states in float32 (the engine casts them), padded as the predictor expects."""
        text = text.float().masked_fill(~mask[..., None], 0)
        if isinstance(self.padding, tuple):
            length = self.padding[1]
            text, mask = _pad(text[:, :length], length), _pad(mask[:, :length], length)
        taken = self.conditions.of_text(given)
        return text, mask, {name: t.float() if t.is_floating_point() else t for name, t in taken.items()}

    def features(self, captions: Sequence[str], device: torch.device) -> list[Features]:
        """What a cache stores of each caption: nothing that depends on the predictor, and no padding."""
        text, mask, given = self._states(self._tokens(captions, device))
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1)
        return [
            {"states": text[row, :length], "mask": mask[row, :length], **_named(given, row)}
            for row, length in enumerate(last.tolist())
        ]

    def of_features(
        self, features: Mapping[str, Tensor], part: str, device: torch.device, length: int = 0
    ) -> Encoded:
        """Text states, mask and conditions from cached features of captions.

        Args:
            features: as in `FeatureBatch`.
            part: their part.
            device: where they are needed.
            length: least number of tokens.
        """
        own = {
            name.removeprefix(f"{part}."): value.to(device)
            for name, value in features.items()
            if name.startswith(f"{part}.")
        }
        text, mask = _pad(own.pop("states"), length), _pad(own.pop("mask"), length)
        return self._finished(text, mask, {name.removeprefix("given "): t for name, t in own.items()})


def _on(device: torch.device, tokens: Tokens) -> dict[str, Tensor]:
    """Tokens by name on a device."""
    named = dict(tokens) if isinstance(tokens, Mapping) else dict(zip(_PAIR, tokens, strict=True))
    return {name: tensor.to(device) for name, tensor in named.items()}


def _named(given: Mapping[str, Tensor], row: int) -> Features:
    return {f"given {name}": tensor[row] for name, tensor in given.items()}


def _rows(found: Encoded, rows: slice) -> Encoded:
    return found[0][rows], found[1][rows], {name: value[rows] for name, value in found[2].items()}


def chosen(own: Encoded, empty: Encoded | None, dropped: Sequence[bool]) -> Encoded:
    """Text states, mask and conditions with those of the empty caption in the `dropped` rows."""
    if empty is None or not any(dropped):
        return own
    order = [len(dropped) if out else row for row, out in enumerate(dropped)]
    rows = copied_to(own[0].device, torch.tensor(order))
    conditions = {name: _joined(value, empty[2][name])[rows] for name, value in own[2].items()}
    return torch.cat([own[0], empty[0]])[rows], torch.cat([own[1], empty[1]])[rows], conditions


def _joined(own: Tensor, empty: Tensor) -> Tensor:
    """Rows of both; the shorter ones are padded at the end with zeros."""
    if own.shape[1:] != empty.shape[1:]:
        length = max(own.shape[1], empty.shape[1])
        own, empty = _pad(own, length), _pad(empty, length)
    return torch.cat([own, empty])


def _pad(tensor: Tensor, length: int) -> Tensor:
    """[B,L,...], padded at the end with zeros to `length` tokens."""
    missing = length - tensor.shape[1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
