"""A transformer with an adapter, and what a LoRA file changes in it."""

from __future__ import annotations

from pathlib import Path

import torch
from mm_diffusers.transformer import DiffusersTransformer
from torch import Tensor, nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import add_adapters, linear_layers
from mm_core.weights.adapters.locate import locate
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


def changes(folder: Path, file: Path) -> dict[str, Tensor]:
    """What a LoRA file adds to the weights of a pipeline's transformer: module -> change [out, in]."""
    task = nn.Module()
    with torch.device("meta"):
        task.predictor = DiffusersTransformer(str(folder))
    linear = {"predictor": linear_layers(task.predictor)}
    found = locate(task, str(file), linear, formats_of(get_registry())).modules
    return {
        name: held.scales[key].factor * held.read(key, "lora_B") @ held.read(key, "lora_A")
        for name, (held, key) in found.items()
    }
