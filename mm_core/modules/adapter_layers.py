"""Adapter layers in a component: their names, and the component as its author wrote it.

The layers are PEFT's: a linear layer `to_q` becomes a module that holds the layer itself as `base_layer`
and, for each adapter, `lora_A`, `lora_B` and, for DoRA, `lora_magnitude_vector`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Modules that hold an adapter's parameters, by the adapter's name."""


def base_name(name: str) -> str:
    """The name that a parameter has in the component without adapters."""
    return name.replace(".base_layer.", ".").removeprefix("base_layer.")


def adapter_of(name: str) -> tuple[str, str, str] | None:
    """(module, part, adapter) of an adapter's parameter: `("blocks.0.to_q", "lora_A", "default")`."""
    pieces = name.split(".")
    for index, piece in enumerate(pieces[:-1]):
        if piece in PARTS and index > 0:
            return ".".join(pieces[:index]), piece, pieces[index + 1]
    return None


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """PEFT's layers in a module, by path."""
    return {
        path: layer
        for path, layer in module.named_modules()
        if "base_layer" in layer._modules and "lora_A" in layer._modules
    }


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Within it the module is what its author wrote: each adapted layer is its base layer."""
    layers = adapted_layers(module)
    for path, layer in layers.items():
        module.set_submodule(path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in layers.items():
            module.set_submodule(path, layer)


def init_adapters(module: nn.Module) -> None:
    """Draws the adapters of a module: the first factor at random, the second zero, so that they begin by
    changing nothing; a DoRA length one, until the weight's own is known."""
    for layer in adapted_layers(module).values():
        for name, kind in layer.adapter_inits.items():
            first = layer.lora_A[name].weight
            if kind == "gaussian":
                nn.init.normal_(first, std=1 / layer.r[name])
            else:
                nn.init.kaiming_uniform_(first, a=math.sqrt(5))
            nn.init.zeros_(layer.lora_B[name].weight)
            if name in layer.lora_magnitude_vector:
                nn.init.ones_(layer.lora_magnitude_vector[name].weight)


def row_lengths(weight: Tensor) -> Tensor:
    """[out]: the length of each row of a linear layer's weight [out, in], where DoRA begins."""
    return (weight.float() ** 2).sum(1).sqrt()
