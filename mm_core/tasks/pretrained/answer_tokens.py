"""Prompts answered in one batch: joining them, and drawing each row's tokens independently of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.contracts import Decoding, Randomness


def joined(rows: Sequence[Mapping[str, Tensor]], pad: int, left: bool = True) -> dict[str, Tensor]:
    """Joins prompts of one row each into a batch: tokens [1,L] are padded to [B,L], tensors of images
    concatenated, with zeros where one is shorter in another dimension.

    A row with images that begins with masked tokens has a blank one. It is left out where another row has an
    image: a model that counts images by the tokens it sees would take the blank for that one.

    Args:
        rows: the model inputs of each prompt.
        pad: the padding token.
        left: whether to pad on the left, for generation that continues after each row's last token.
    """
    if len(rows) == 1:
        return dict(rows[0])
    # Without a mask, the model would attend to padding.
    rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    of_tokens = [n for n in rows[0] if all(row[n].shape == row["input_ids"].shape for row in rows)]
    blank = [len(row) > len(of_tokens) and not bool(row["attention_mask"][0, 0]) for row in rows]
    if any(blank) and not all(blank):
        rows = [
            {n: row[n][:, row["attention_mask"][0] > 0] for n in of_tokens} if alone else row
            for row, alone in zip(rows, blank, strict=True)
        ]
    batch, side = {}, "left" if left else "right"
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in of_tokens:
            value = pad if name == "input_ids" else 0
            batch[name] = pad_sequence([row[name][0] for row in rows], True, value, side)
        else:
            batch[name] = padded_cat([row[name] for row in rows if name in row])
    return batch


def padded_cat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors joined along an axis, with zeros where one is shorter than others in another."""
    shape = [max(part.shape[n] for part in parts) for n in range(parts[0].dim())]
    full = [
        part.new_zeros([part.shape[n] if n == axis else most for n, most in enumerate(shape)])
        if [*part.shape[:axis], *part.shape[axis + 1 :]] != [*shape[:axis], *shape[axis + 1 :]]
        else part
        for part in parts
    ]
    for place, part in zip(full, parts, strict=True):
        if place is not part:
            place[tuple(slice(size) for size in part.shape)] = part
    return torch.cat(full, axis)


class SeededTokenSampler:
    """Draws the next token of each answer with the answer's own generator, so no answer depends on another.

    A logits processor for Transformers' `generate`, which then takes the most likely token.

    Args:
        decoding: temperature, top_p and the seed.
        numbers: the number of each row's answer; answer i is drawn from (seed, i).
    """

    def __init__(self, decoding: Decoding, numbers: Sequence[int]) -> None:
        self.temperature, self.top_p = decoding.temperature, decoding.top_p
        self._generators = [Randomness(decoding.seed).generator("answer", number) for number in numbers]

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The logits [B,V] of a draw: 0 for each row's drawn token, -inf elsewhere."""
        # In float64: a row's sums must not depend on the other rows of its batch.
        logits = scores.double()
        logits = (logits - logits.max(-1, keepdim=True).values) / self.temperature
        sums = self._nucleus(logits.softmax(-1)).cumsum(-1)
        drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        drawn = drawn.to(sums.device)[:, None] * sums[:, -1:]
        found = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, found, 0.0)

    def _nucleus(self, shares: Tensor) -> Tensor:
        """Probabilities of the most likely tokens, up to the first that makes their sum `top_p`; 0 elsewhere
        (nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751)."""
        if self.top_p >= 1:
            return shares
        ordered = shares.sort(-1, descending=True).values
        within = ordered.cumsum(-1) - ordered < self.top_p
        least = ordered.masked_fill(~within, 2.0).min(-1, keepdim=True).values
        return shares.where(shares >= least, 0.0)


@dataclass(frozen=True)
class StopWhenAsked:
    """A stopping criterion for Transformers' `generate`: ends all answers once `asked` returns True."""

    asked: Callable[[], bool]

    def __call__(self, tokens: Tensor, scores: object, **others: object) -> Tensor:
        """Whether each answer has ended, bool [B]."""
        return torch.full((len(tokens),), self.asked(), dtype=torch.bool, device=tokens.device)
