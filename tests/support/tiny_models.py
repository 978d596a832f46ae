"""Modules small enough to compute by hand, a task around them for engines and plans, and one for configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ONE_BLOCK: dict[str, Any] = {
    "type": "text_to_video",
    "predictor": {
        "type": "custom_dit",
        "num_layers": 1,
        "num_heads": 2,
        "head_dim": 12,
        "in_channels": 12,
        "out_channels": 12,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
        "rope_max_seq_len": 16,
    },
    "autoencoder": {"type": "pixel"},
    "text_encoder": {"type": "bytes", "hidden_size": 16},
    "scheduler": {"type": "flow_match"},
}
"""The section `task` of a config: a DiT of one block, between the encoders that need no files."""


class Task(nn.Module):
    """A task that trains the given components, each under its name."""

    frozen: tuple[str, ...] = ()

    def __init__(self, **components: nn.Module) -> None:
        super().__init__()
        self.trainable = tuple(components)
        for name, component in components.items():
            self.add_module(name, component)


class OddNet(nn.Module):
    """Odd sizes, so that the shards of two ranks are unequal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())

    def init_weights(self) -> None:
        for layer in (self.first, self.last):
            layer.reset_parameters()
        self.norm.reset_parameters()
