"""Adapter layers in a component: their names, and the component without them.

The layers are PEFT's: a linear layer `to_q` becomes a module that contains the layer itself as `base_layer`
and, for each adapter, `lora_A`, `lora_B` and, for DoRA, `lora_magnitude_vector`; or the matrices of a LoKr or
LoHa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MODULES = ("lora_A", "lora_B", "lora_magnitude_vector")
_PARAMETERS = tuple(f"lokr_w{n}{end}" for n in (1, 2) for end in ("", "_a", "_b"))
_PARAMETERS += tuple(f"hada_w{n}_{end}" for n in (1, 2) for end in "ab")
PARTS = (*_MODULES, *_PARAMETERS)
"""What contains an adapter's parameters, by the adapter's name: modules, and parameters of LoKr and LoHa."""


def part_name(module: str, part: str, adapter: str) -> str:
    """The name of an adapter's parameter in its component."""
    return f"{module}.{part}.{adapter}{'.weight' if part in _MODULES else ''}"


def base_name(name: str) -> str:
    """The name of a parameter in its component without adapter layers."""
    return name.replace(".base_layer.", ".").removeprefix("base_layer.")


def adapter_of(name: str) -> tuple[str, str, str] | None:
    """Splits an adapter parameter's name: `("blocks.0.to_q", "lora_A", "default")`; None for any other."""
    pieces = name.split(".")
    for index, piece in enumerate(pieces[:-1]):
        if piece in PARTS and index > 0:
            return ".".join(pieces[:index]), piece, pieces[index + 1]
    return None


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The adapter layers (PEFT's) in a module, by path."""
    return {
        path: layer
        for path, layer in module.named_modules()
        if "base_layer" in layer._modules and not layer._modules.keys().isdisjoint(PARTS)
    }


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """A context in which a module has no adapter layers: each is replaced by its base layer."""
    layers = adapted_layers(module)
    for path, layer in layers.items():
        module.set_submodule(path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in layers.items():
            module.set_submodule(path, layer)


def init_adapters(module: nn.Module) -> None:
    """Initialises the adapter layers in a module: lora_A at random, lora_B zero, so that nothing changes yet.

    A DoRA magnitude is one until the row lengths of the weight are known.
    """
    for layer in adapted_layers(module).values():
        for name, kind in layer.adapter_inits.items():
            if "lora_A" not in layer._modules:
                layer.reset_adapter_parameters(name)  # PEFT's: one factor is zero
                continue
            first = layer.lora_A[name].weight
            if kind == "gaussian":
                nn.init.normal_(first, std=1 / layer.r[name])
            else:
                nn.init.kaiming_uniform_(first, a=math.sqrt(5))
            nn.init.zeros_(layer.lora_B[name].weight)
            if name in layer.lora_magnitude_vector:
                nn.init.ones_(layer.lora_magnitude_vector[name].weight)


def row_lengths(weight: Tensor) -> Tensor:
    """The row lengths [out] of a linear layer's weight [out, in]: initial magnitudes of a DoRA adapter."""
    return (weight.float() ** 2).sum(1).sqrt()
