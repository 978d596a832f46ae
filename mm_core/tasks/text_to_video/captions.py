"""Captions of a batch as hidden states: tokens, dropped captions, the padding the predictor expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import (
    Batch,
    CachePart,
    CountingTokenizer,
    DictBatch,
    EncodedText,
    Features,
    Ragged,
    SupportsCaptions,
    SupportsReads,
    TextEncoder,
    Tokenizer,
    Tokens,
    VideoTextBatch,
)
from mm_core.data.cache.samples import stacked, tensor_of
from mm_core.device import copied_to
from mm_core.errors import ContractError, did_you_mean
from mm_core.tasks.text_to_video.checks import clips_of
from mm_core.tasks.text_to_video.conditions import Conditions, check_returned
from mm_core.tasks.text_to_video.inputs import OF_CLIP, fields_of, picture_of
from mm_core.tasks.text_to_video.returned_shapes import expect_text, expect_tokens

Encoded = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Text states [B,L,D], mask [B,L], and the text encoder's conditions [B,...] that the predictor takes.

The mask is on the host where it is known there: of cached captions, or of an encoder that returns it so."""


TEXTS = "text states"
"""The part of the feature cache for captions."""

_EMPTY = "empty "
_PAIR = ("ids", "mask")


@dataclass(frozen=True)
class TokenizeCaptions:
    """Fills `text_ids` and `text_mask` of a batch in the data worker; one of plain dicts becomes clips.

    Attributes:
        tokenizer: of the text encoder; None: it is given captions.
        fields: names that the predictor's inputs read; of plain dicts, nothing else is kept.
        reads: of the text encoder (`SupportsReads`).
        drops: whether captions are dropped: with `reads`, tokens of as many empty captions come behind them.
    """

    tokenizer: Tokenizer | None
    fields: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    drops: bool = False

    def __call__(self, batch: Batch) -> Batch:
        if isinstance(batch, DictBatch):
            batch = clips_of(batch, self.fields)
            if batch.text_ids is not None:
                return batch
        assert isinstance(batch, VideoTextBatch)
        if self.tokenizer is None:
            return batch
        tokens = tokens_of(self.tokenizer, batch.captions, self.reads, _fields(batch), self.drops)
        cut = cut_captions(self.tokenizer, batch.captions, tokens)
        if isinstance(tokens, Mapping):
            return replace(batch, tokens=dict(tokens), cut=cut)
        return replace(batch, text_ids=tokens[0], text_mask=tokens[1], cut=cut)


@dataclass(frozen=True)
class _Strings:
    """Captions in the place of tokens (`SupportsCaptions`), with the fields that the encoder reads, and the
    device of their states."""

    captions: list[str]
    fields: Mapping[str, list[list[Any]]]
    device: torch.device


_Given = dict[str, Tensor] | _Strings


def _fields(batch: VideoTextBatch) -> dict[str, Any]:
    return fields_of(batch.pixels, batch.fields)


def tokens_of(
    tokenizer: Tokenizer,
    captions: Sequence[str],
    reads: Sequence[str],
    fields: Mapping[str, Any],
    drops: bool = False,
) -> Tokens:
    """The tokens of captions; of an encoder that reads fields, with them, and with `drops` twice as many:
    those of empty captions with the same fields.

    Raises:
        ContractError: a field is missing, or the tokenizer returns something else than tokens of each.
    """
    if not reads:
        return expect_tokens(tokenizer(captions), len(captions), tokenizer)
    both, given = _with_fields(captions, reads, fields, drops)
    return expect_tokens(tokenizer(both, given), len(both), tokenizer)


def _with_fields(
    captions: Sequence[str], reads: Sequence[str], fields: Mapping[str, Any], drops: bool
) -> tuple[list[str], dict[str, list[list[Any]]]]:
    """Captions and the fields of each that an encoder reads, with `drops` once more with empty captions."""
    given = {name: _shown(name, fields) * (2 if drops else 1) for name in reads}
    return [*captions, *[""] * (len(captions) if drops and reads else 0)], given


def _shown(name: str, fields: Mapping[str, Any]) -> list[list[Any]]:
    """A field of each row as a tokenizer reads it (see `SupportsReads`)."""
    if name not in fields:
        raise ContractError(
            f"the text encoder reads the field `{name}`, which is not given",
            where="task.text_encoder",
            accepted=", ".join(fields) or "no field: the batch has neither pixels nor fields",
            hint=did_you_mean(name, fields) or f"give the samples a value `{name}`",
        )
    values = fields[name]
    rows = (
        values.rows
        if isinstance(values, Ragged)
        else [own if type(own) is tuple else (own,) for own in values]
    )
    return [
        [picture_of(one).cpu() if isinstance(one, Tensor) and one.dim() >= 3 else float(one) for one in row]
        for row in rows
    ]


def cut_captions(tokenizer: Tokenizer, captions: Sequence[str], tokens: Tokens) -> list[int]:
    """The tokens of each caption that is longer than its mask; only those that fill it are counted again."""
    if not isinstance(tokenizer, CountingTokenizer):
        return []
    full = list(captions)
    if isinstance(tokens, tuple):
        if tokens[1].shape[1] < tokenizer.max_length:
            return []
        own = tokens[1][: len(captions)]  # without those of empty captions
        full = [text for text, filled in zip(captions, own.all(1).tolist(), strict=True) if filled]
    counts = tokenizer.token_counts(full) if full else []
    return [count for count in counts if count > tokenizer.max_length]


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

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields on which the encoder's states depend."""
        return self.encoder.reads if isinstance(self.encoder, SupportsReads) else ()

    def encoded(self, batch: VideoTextBatch, empty: bool) -> tuple[Encoded, Encoded | None]:
        """The captions of a batch, tokenized or not, on the device of its clips; with `empty` also the empty
        caption: one row, or with the fields of each row that the encoder reads. A sharded encoder gathers its
        weights in each call, so this is one call."""
        tokens, rows = self._of_batch(batch, empty), len(batch)
        if not empty:
            return self._encode(tokens), None
        found = self._encode(tokens if self.reads else self._with_empty(tokens))
        return _rows(found, slice(rows)), _rows(found, slice(rows, None))

    def _of_batch(self, batch: VideoTextBatch, empty: bool) -> _Given:
        ids, mask = batch.text_ids, batch.text_mask
        given = batch.tokens if ids is None or mask is None else (ids, mask)
        if not given:
            return self._tokens(batch.captions, batch.device, _fields(batch), empty)
        tokens = _on(batch.device, given)
        return tokens if empty or not self.reads else {n: t[: len(batch)] for n, t in tokens.items()}

    def encoded_texts(
        self, captions: Sequence[str], device: torch.device, fields: Mapping[str, Any]
    ) -> Encoded:
        """Text states, mask and conditions of captions given as strings; `fields`: those that it reads."""
        known = [self.find(caption) for caption in captions] if self.find is not None else [None]
        if None not in known:
            return self.of_features(stacked([{"": row} for row in known if row is not None]), "", device)
        return self._encode(self._tokens(captions, device, fields))

    def _tokens(
        self,
        captions: Sequence[str],
        device: torch.device,
        fields: Mapping[str, Any] = MappingProxyType({}),
        drops: bool = False,
    ) -> _Given:
        if isinstance(self.encoder, SupportsCaptions):
            return _Strings(*_with_fields(captions, self.reads, fields, drops), device)
        return _on(device, tokens_of(self.encoder.tokenizer(), captions, self.reads, fields, drops))

    def _with_empty(self, tokens: _Given) -> _Given:
        """Tokens with a row of the empty caption after them."""
        if isinstance(tokens, _Strings):
            return replace(tokens, captions=[*tokens.captions, ""])
        device = next(iter(tokens.values())).device
        empty = self._empty = _on(device, self._empty or tokens_of(self.encoder.tokenizer(), [""], (), {}))
        return {name: _joined(own, empty[name]) for name, own in tokens.items()}

    def _encode(self, tokens: _Given) -> Encoded:
        return self._finished(*self._states(tokens))

    def _states(self, tokens: _Given) -> Encoded:
        if isinstance(tokens, _Strings):
            assert isinstance(self.encoder, SupportsCaptions)
            rows = len(tokens.captions)
            read = {"fields": tokens.fields} if self.reads else {}
            found = self.encoder.encode_captions(tokens.captions, tokens.device, **read)
        else:
            rows = len(next(iter(tokens.values())))
            encode: Callable[..., EncodedText] = self.encoder.encode
            found = encode(*tokens.values()) if tuple(tokens) == _PAIR else encode(**tokens)
        text, mask, *others = expect_text(found, rows, self.encoder)
        given: Mapping[str, Tensor] = others[0] if others else {}
        check_returned(given, self.encoder, rows)
        return text, mask, given

    def _finished(self, text: Tensor, mask: Tensor, given: Mapping[str, Tensor]) -> Encoded:
        """Hidden states in float32 (the engine casts them), padded as the predictor expects."""
        text = text.float().masked_fill(copied_to(text.device, ~mask)[..., None], 0)
        if isinstance(self.padding, tuple):
            length = self.padding[1]
            text, mask = _pad(text[:, :length], length), _pad(mask[:, :length], length)
        taken = self.conditions.of_text(given)
        return text, mask, {name: t.float() if t.is_floating_point() else t for name, t in taken.items()}

    def cache_part(self, drops: bool) -> CachePart:
        """The part of the feature cache for captions, or for samples if the encoder reads their fields."""
        if not self.reads:
            return CachePart(TEXTS, ("text_encoder",), "text", texts=("",) if drops else ())
        fields = tuple(name for name in self.reads if name not in OF_CLIP)
        settings = {"fields": list(self.reads), "empty": drops}
        return CachePart(TEXTS, ("text_encoder",), "media", settings, fields=fields, caption=True)

    def features(self, captions: Sequence[str], device: torch.device) -> list[Features]:
        """What a cache stores of each caption: nothing that depends on the predictor, and no padding."""
        return self._unpadded(self._tokens(captions, device))

    def features_of(self, batch: VideoTextBatch, drops: bool) -> list[Features]:
        """What a cache stores of each sample, whose fields the encoder reads."""
        found = self._unpadded(self._of_batch(batch, drops))
        own, empty = found[: len(batch)], found[len(batch) :]
        for row, other in zip(own, empty, strict=bool(empty)):
            row |= {f"{_EMPTY}{name}": value for name, value in other.items()}
        return own

    def of_batch(
        self,
        features: Mapping[str, Any],
        texts: Mapping[str, Any],
        drops: bool,
        device: torch.device,
    ) -> tuple[Encoded, Encoded | None]:
        """As `encoded`, from cached features.

        Args:
            features: of the samples.
            texts: of the empty caption, where the encoder reads no fields.
            drops: whether captions may be dropped.
            device: where they are needed.
        """
        if self.reads:
            before = f"{TEXTS}.{_EMPTY}"
            texts = {
                f"{TEXTS}.{n.removeprefix(before)}": t for n, t in features.items() if n.startswith(before)
            }
            features = {name: value for name, value in features.items() if not name.startswith(before)}
        length = max((found[f"{TEXTS}.mask"].shape[1] for found in (features, texts) if found), default=0)
        empty = self.of_features(texts, TEXTS, device, length) if drops else None
        return self.of_features(features, TEXTS, device, length), empty

    def _unpadded(self, tokens: _Given) -> list[Features]:
        text, mask, given = self._states(tokens)
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
        before = f"{part}."
        named = {n.removeprefix(before): tensor_of(t) for n, t in features.items() if n.startswith(before)}
        own = {name: t if name == "mask" else copied_to(device, t) for name, t in named.items()}
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
    each = len(empty[0]) > 1  # the empty caption with the fields of each row, or one for all
    order = [len(dropped) + row * each if out else row for row, out in enumerate(dropped)]
    rows = copied_to(own[0].device, torch.tensor(order))
    conditions = {name: _joined(value, empty[2][name])[rows] for name, value in own[2].items()}
    mask = torch.cat([own[1], empty[1]])
    return torch.cat([own[0], empty[0]])[rows], mask[copied_to(mask.device, torch.tensor(order))], conditions


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
