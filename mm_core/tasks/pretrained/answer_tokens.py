"""Tokens of several prompts that are answered together: laid side by side, and drawn apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mm_core.contracts import Decoding, Randomness


def joined(rows: Sequence[Mapping[str, Tensor]], pad: int, left: bool = True) -> dict[str, Tensor]:
    """The inputs of rows [1,L] as those of one batch [B,L]: shorter ones are padded, on the left where each
    goes on behind its last token. What is no row of tokens (images) lies one behind the other."""
    if len(rows) == 1:
        return dict(rows[0])
    # Without a mask, padding would be read.
    rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    longest = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        if all(row[name].shape == row["input_ids"].shape for row in rows):
            value = pad if name == "input_ids" else 0
            parts = [_padded(part, longest - part.shape[1], value, left) for part in parts]
        batch[name] = torch.cat(parts)
    return batch


def _padded(row: Tensor, count: int, value: int, left: bool) -> Tensor:
    return functional.pad(row, (count, 0) if left else (0, count), value=value)


class SeededTokenSampler:
    """Draws each row's next token, by a number from the row's own generator: what a row is answered depends
    on no other. What Transformers' `generate` takes for a logits processor; it then takes the likeliest.

    Args:
        decoding: temperature, top_p and the seed.
        numbers: of the answers; answer i is drawn from (seed, i).
    """

    def __init__(self, decoding: Decoding, numbers: Sequence[int]) -> None:
        self.temperature, self.top_p = decoding.temperature, decoding.top_p
        self._generators = [Randomness(decoding.seed).generator("answer", number) for number in numbers]

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """[B,V]: 0 for the token that is drawn, -inf elsewhere."""
        # In float64: a row's sums are to be the same whatever it is computed beside.
        logits = scores.double()
        logits = (logits - logits.max(-1, keepdim=True).values) / self.temperature
        sums = self._nucleus(logits.softmax(-1)).cumsum(-1)
        drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        drawn = drawn.to(sums.device)[:, None] * sums[:, -1:]
        found = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, found, 0.0)

    def _nucleus(self, shares: Tensor) -> Tensor:
        """The likeliest tokens' probabilities, up to the first with which they sum to `top_p`; 0 elsewhere
        (nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751)."""
        if self.top_p >= 1:
            return shares
        ordered = shares.sort(-1, descending=True).values
        within = ordered.cumsum(-1) - ordered < self.top_p
        least = ordered.masked_fill(~within, 2.0).min(-1, keepdim=True).values
        return shares.where(shares >= least, 0.0)


@dataclass(frozen=True)
class StopWhenAsked:
    """Ends all answers once it is asked for: what Transformers' `generate` takes for a stopping criterion."""

    asked: Callable[[], bool]

    def __call__(self, tokens: Tensor, scores: object, **others: object) -> Tensor:
        """[B]: whether a row has ended."""
        return torch.full((len(tokens),), self.asked(), dtype=torch.bool, device=tokens.device)
