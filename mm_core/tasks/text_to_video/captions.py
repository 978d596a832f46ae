"""Captions of a batch as hidden states: tokens, dropped captions, the padding the predictor expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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

    def encoded(self, batch: VideoTextBatch, dropped: Sequence[bool] = ()) -> Encoded:
        """Text states, mask and conditions of a batch's captions, on the device of its pixels.

        Args:
            batch: the clips and their captions, tokenized or not.
            dropped: for each row, whether to encode the empty caption in place of its own.
        """
        ids, mask = batch.text_ids, batch.text_mask
        if ids is None or mask is None:
            ids, mask = self.encoder.tokenizer()(batch.captions)
        device = batch.pixels.device
        return self._encode(*self._without(dropped, ids.to(device), mask.to(device)))

    def encoded_texts(self, captions: Sequence[str], device: torch.device) -> Encoded:
        """Text states, mask and conditions of captions given as strings."""
        ids, mask = self.encoder.tokenizer()(captions)
        return self._encode(ids.to(device), mask.to(device))

    def _without(self, dropped: Sequence[bool], ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of a batch, with those of the empty caption in the `dropped` rows."""
        if not any(dropped):
            return ids, mask
        empty_ids, empty_mask = self._empty
        length = max(ids.shape[1], empty_ids.shape[1])
        ids, mask = _pad(ids, length), _pad(mask, length)
        rows = torch.tensor(dropped, device=ids.device)[:, None]
        empty_ids, empty_mask = _pad(empty_ids, length).to(ids), _pad(empty_mask, length).to(mask)
        return torch.where(rows, empty_ids, ids), torch.where(rows, empty_mask, mask)

    @cached_property
    def _empty(self) -> tuple[Tensor, Tensor]:
        return self.encoder.tokenizer()([""])

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


def _pad(tensor: Tensor, length: int) -> Tensor:
    """[B,L] or [B,L,D], padded at the end with zeros to `length` tokens."""
    missing = length - tensor.shape[1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
