"""A plugin's task that takes part in the feature cache: it learns a number of a caption from its states."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import CachePart, FeatureBatch, TaskModule, TextEncoder
from mm_core.plugin import ComponentConfig, Kind


@hookimpl
def mm_tasks():
    return [
        Component(name="letters", target="cached_task:Letters", config="cached_task:LettersConfig"),
        Component(name="trained", target="cached_task:Trained", config="cached_task:LettersConfig"),
    ]


@dataclass(frozen=True)
class LettersConfig:
    """Config of both."""

    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")]


class Letters(TaskModule):
    """Learns the share of letters in a caption.

    Args:
        text_encoder: frozen.
    """

    def __init__(self, text_encoder: TextEncoder) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.head = nn.Linear(text_encoder.hidden_size, 1)

    def losses(self, batch):
        """The squared error of each caption."""
        if isinstance(batch, FeatureBatch):
            states = batch.features["means.mean"]
            wanted = batch.features["means.letters"]
        else:
            rows = self.features("means", batch.captions)
            states, wanted = (torch.stack([row[name] for row in rows]) for name in ("mean", "letters"))
        return (self.head(states)[:, 0] - wanted).square()

    def cache_parts(self):
        """The mean state of each caption."""
        return (CachePart("means", ("text_encoder",), "text", settings={"version": 1}),)

    @torch.no_grad()
    def features(self, part, given):
        """The mean state of each text, and the share of its letters."""
        ids, mask = self.text_encoder.tokenizer()(given)
        states, mask = self.text_encoder.encode(ids, mask)
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        letters = [sum(map(str.isalpha, text)) / max(len(text), 1) for text in given]
        return [{"mean": m, "letters": torch.tensor(n)} for m, n in zip(means, letters, strict=True)]

    def use_texts(self, find):
        """It samples nothing."""


class Trained(Letters):
    """The same, but it trains what the cache would keep."""

    @property
    def trainable(self):
        """With the encoder."""
        return ("head", "text_encoder")
