"""Prompts answered in one batch: joining them, and drawing each row's tokens independently of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.contracts import Decoding, Randomness


def joined(rows: Sequence[Mapping[str, Tensor]], pad: int, left: bool = True) -> dict[str, Tensor]:
    """Joins prompts of one row each into a batch: tokens [1,L] are padded to [B,L], images concatenated.

    Args:
        rows: the model inputs of each prompt.
        pad: the padding token.
        left: whether to pad on the left, for generation that continues after each row's last token.
    """
    if len(rows) == 1:
        return dict(rows[0])
    # Without a mask, the model would attend to padding.
    rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    batch, side = {}, "left" if left else "right"
    for name in rows[0]:
        if all(row[name].shape == row["input_ids"].shape for row in rows):
            value = pad if name == "input_ids" else 0
            batch[name] = pad_sequence([row[name][0] for row in rows], True, value, side)
        else:
            batch[name] = torch.cat([row[name] for row in rows])
    return batch


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
