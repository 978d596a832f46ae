"""A transformer with an adapter, on the meta device."""

from __future__ import annotations

from pathlib import Path

import torch
from mm_diffusers.transformer import DiffusersTransformer
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import add_adapters
from mm_core.weights.fitting import formats_of


class TunedTask(nn.Module):
    """As much of a task as `add_adapters` reads.

    Args:
        folder: the pipeline.
        adapter: what the transformer gets.
    """

    trainable, frozen = ("predictor",), ()

    def __init__(self, folder: Path, adapter: AdapterConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = DiffusersTransformer(str(folder))
        add_adapters(self, [adapter], formats_of(get_registry()))
