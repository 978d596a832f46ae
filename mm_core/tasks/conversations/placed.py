"""Where the characters of a text, and its pictures, are in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_core.contracts import IGNORED_LABEL

Span = tuple[int, int]
"""[start, end) in characters or tokens."""

Learnt = tuple[int, int, float]
"""[start, end) in characters of what is learnt, and the weight of its loss."""


def put_in(text: str, places: Sequence[Span], puts: Sequence[str]) -> tuple[str, list[tuple[Span, Span]]]:
    """A text with other texts in some places, and each place with its new one."""
    parts, moves, last, moved = [], [], 0, 0
    for (start, end), put in zip(places, puts, strict=True):
        parts += [text[last:start], put]
        moves.append(((start, end), (start + moved, start + moved + len(put))))
        last, moved = end, moved + len(put) - (end - start)
    return "".join([*parts, text[last:]]), moves


@dataclass(frozen=True)
class Placed:
    """A text in which pictures were put, and its tokens.

    Attributes:
        begins: [L] the first character of each token in the new text; -1 for a token of no text.
        moves: the place of each picture in the old text, and in the new one.
    """

    begins: Tensor
    moves: Sequence[tuple[Span, Span]]

    @classmethod
    def of(cls, offsets: Tensor, moves: Sequence[tuple[Span, Span]]) -> Placed:
        """From the tokenizer's offsets [L,2]."""
        begins, ends = offsets.unbind(-1)
        return cls(torch.where(begins == ends, -1, begins), moves)

    def labels(self, ids: Tensor, spans: Sequence[Learnt]) -> dict[str, Tensor]:
        """`labels` [L] of what is learnt, spans of the old text, and `label_weights` [L] if one is not 1."""
        weights = torch.zeros(len(ids))
        for start, end, weight in spans:
            weights[(self.begins >= self._moved(start)) & (self.begins < self._moved(end))] = weight
        found = {"labels": torch.where(weights > 0, ids, IGNORED_LABEL)}
        return found if all(weight == 1 for *_, weight in spans) else {**found, "label_weights": weights}

    def _moved(self, place: int) -> int:
        """The place of a character after pictures were put in."""
        before = [(old, new) for old, new in self.moves if old[1] <= place]
        return place + (before[-1][1][1] - before[-1][0][1] if before else 0)

    def blocks(self) -> list[Span]:
        """[start, end) in tokens of each picture."""
        found = []
        for _, (start, end) in self.moves:
            within = ((self.begins >= start) & (self.begins < end)).nonzero().flatten()
            found.append((int(within[0]), int(within[-1]) + 1))
        return found
