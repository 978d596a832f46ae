"""Captions of a batch as hidden states: tokens, dropped captions, the padding the predictor expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mm_core.contracts import Batch, TextEncoder, Tokenizer, VideoTextBatch
from mm_core.tasks.text_to_video.conditions import check_returned
from mm_core.tasks.text_to_video.returned_shapes import expect_text

Encoded = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Text states [B,L,D], mask [B,L], and the text encoder's conditions [B,...] by name."""


@dataclass(frozen=True)
class TokenizeCaptions:
    """Tokenizes the captions of a batch in the data worker: fills `text_ids` and `text_mask`."""

    tokenizer: Tokenizer

    def __call__(self, batch: Batch) -> Batch:
        assert isinstance(batch, VideoTextBatch)
        ids, mask = self.tokenizer(batch.captions)
        return replace(batch, text_ids=ids, text_mask=mask)


@dataclass(eq=False)
class Captions:
    """Encodes captions with the task's text encoder.

    Args:
        encoder: the text encoder.
        padding: the predictor's `text_padding`.
    """

    encoder: TextEncoder
    padding: str | tuple[str, int]
    _empty: Encoded | None = field(default=None, init=False)

    def encoded(self, batch: VideoTextBatch) -> Encoded:
        """Text states, mask and conditions of a batch's captions, tokenized or not, on the device of its
        pixels."""
        ids, mask = batch.text_ids, batch.text_mask
        if ids is None or mask is None:
            ids, mask = self.encoder.tokenizer()(batch.captions)
        device = batch.pixels.device
        return self._encode(ids.to(device), mask.to(device))

    def empty(self, device: torch.device) -> Encoded:
        """Text states, mask and conditions of the empty caption, one row; encoded once."""
        if self._empty is None or self._empty[0].device != device:
            self._empty = self.encoded_texts([""], device)
        return self._empty

    def encoded_texts(self, captions: Sequence[str], device: torch.device) -> Encoded:
        """Text states, mask and conditions of captions given as strings."""
        ids, mask = self.encoder.tokenizer()(captions)
        return self._encode(ids.to(device), mask.to(device))

    def _encode(self, ids: Tensor, mask: Tensor) -> Encoded:
        """Hidden states in float32 (the engine casts them), padded as the predictor expects."""
        rows = len(ids)
        text, mask, *others = expect_text(self.encoder.encode(ids, mask), rows, self.encoder)
        given: Mapping[str, Tensor] = others[0] if others else {}
        check_returned(given, self.encoder, rows)
        text = text.float().masked_fill(~mask[..., None], 0)
        if isinstance(self.padding, tuple):
            length = self.padding[1]
            text, mask = _pad(text[:, :length], length), _pad(mask[:, :length], length)
        conditions = {name: t.float() if t.is_floating_point() else t for name, t in given.items()}
        return text, mask, conditions


def chosen(own: Encoded, empty: Encoded, dropped: Sequence[bool]) -> Encoded:
    """Text states, mask and conditions with those of the empty caption (one row) in the `dropped` rows."""
    if not any(dropped):
        return own
    rows = torch.tensor(dropped, device=own[0].device)

    def each(mine: Tensor, other: Tensor) -> Tensor:
        if mine.dim() > 1:
            length = max(mine.shape[1], other.shape[1])
            mine, other = _pad(mine, length), _pad(other, length)
        return torch.where(rows.view(-1, *[1] * (mine.dim() - 1)), other, mine)

    conditions = {name: each(value, empty[2][name]) for name, value in own[2].items()}
    return each(own[0], empty[0]), each(own[1], empty[1]), conditions


def _pad(tensor: Tensor, length: int) -> Tensor:
    """[B,L,...], padded at the end with zeros to `length` tokens."""
    missing = length - tensor.shape[1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
