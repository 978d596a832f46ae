"""FLOPs of a training step, from the products of a forward and the trained parameters."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from mm_core.contracts.flops import ModuleFlops, StepFlops, SupportsModuleFlops
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.modules.patterns import above


def products_of(module: SupportsModuleFlops, shapes: Mapping[str, Any]) -> Sequence[ModuleFlops]:
    """The products of a forward with arguments of these shapes, of which `module_flops` gets those it names:
    one that a predictor inherits does not know the inputs that it adds."""
    named = inspect.signature(module.module_flops).parameters
    if all(each.kind is not each.VAR_KEYWORD for each in named.values()):
        shapes = {name: shape for name, shape in shapes.items() if name in named}
    return module.module_flops(**shapes)


def step_flops(
    module: nn.Module, products: Sequence[ModuleFlops], recomputed: Collection[str] = ()
) -> StepFlops:
    """The FLOPs of a module's forward and backward, from the products of its forward (`module_flops`).

    In the backward, a product with a weight costs its forward once for the weight's gradient, if the weight
    is trained, and once for the input's gradient, if anything before it is trained. A product of two
    activations costs its forward once for each that needs a gradient. Adapters
    (https://arxiv.org/abs/2106.09685) are counted with their layers; DoRA's magnitudes are not counted.

    Args:
        module: the module, built (also on the meta device); its parameters show which are trained.
        products: in the order of the forward.
        recomputed: paths in `module` of modules whose forward runs again in the backward; "" is the module.
    """
    adapted = adapted_layers(module)
    trained = {path for name, p in module.named_parameters() if p.requires_grad for path in _paths(name)}
    forward = backward = again = 0.0
    differentiable: set[str] = set()  # paths whose outputs have a gradient

    def fed(paths: Collection[str] | None) -> bool:
        if paths is None:
            return bool(differentiable)
        return any(path in trained or path in differentiable for path in paths)

    for product in products:
        place, first = product.module, fed(product.after)
        layer: Any = module.get_submodule(place)
        extra = extra_back = 0.0
        if place in adapted:
            extra, extra_back = _of_adapters(layer, first)
            layer = layer.base_layer
        if product.second is None:
            other = any(p.requires_grad and p.dim() > 1 for p in layer.parameters(recurse=False))
            moved = place in trained
        else:
            moved = other = fed(product.second)
        forward += product.flops * (1 + extra)
        backward += product.flops * (first + other + extra_back)
        if first or moved:
            differentiable.update(_paths(place))
        if "" in recomputed or any(path in recomputed for path in _paths(place)):
            again += product.flops * (1 + extra)
    return StepFlops(forward, backward, again)


def _paths(name: str) -> list[str]:
    """`blocks.0.ffn` -> `blocks`, `blocks.0`, `blocks.0.ffn`."""
    return [*above(name), name]


def _of_adapters(layer: Any, fed: bool) -> tuple[float, float]:
    """Forward and backward of a layer's adapters, as shares of the layer's own forward."""
    forward = backward = 0.0
    whole = layer.base_layer.in_features * layer.base_layer.out_features
    for name in layer.active_adapters:
        if "lora_A" not in layer._modules:  # PEFT multiplies by the whole change of a LoKr or LoHa
            forward, backward = forward + 1, backward + 1 + fed
            continue
        first, second = layer.lora_A[name].weight, layer.lora_B[name].weight
        into, out = first.numel() / whole, second.numel() / whole
        forward += into + out
        backward += into * (first.requires_grad + fed)
        backward += out * (second.requires_grad + (first.requires_grad or fed))
    return forward, backward
