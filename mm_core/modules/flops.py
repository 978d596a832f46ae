"""FLOPs of a training step, from the products of a forward and the trained parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from mm_core.contracts.flops import ModuleFlops, StepFlops, SupportsModuleFlops
from mm_core.device.torch_private import TorchDispatchMode
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.modules.patterns import above


def products_of(module: SupportsModuleFlops, shapes: Mapping[str, Any]) -> Sequence[ModuleFlops]:
    """The products of a forward with arguments of these shapes, of which `module_flops` gets those it names:
    one that a predictor inherits does not know the inputs that it adds."""
    named = inspect.signature(module.module_flops).parameters
    if all(each.kind is not each.VAR_KEYWORD for each in named.values()):
        shapes = {name: shape for name, shape in shapes.items() if name in named}
    return module.module_flops(**shapes)


def counted_flops(
    module: nn.Module, arguments: Mapping[str, Any], recomputed: Collection[str] = ()
) -> StepFlops | None:
    """The FLOPs of a module's forward and backward, by torch's formulas, for one that declares no products;
    None if its forward fails without numbers.

    Args:
        module: on the meta device, but for its buffers; its parameters show which are trained.
        arguments: of the forward, with tensors on the meta device.
        recomputed: as of `step_flops`.
    """
    module = copy.deepcopy(module)  # a forward may keep tensors, which would be without numbers
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    counting = _Counting()
    for path in recomputed:
        again = module.get_submodule(path)
        again.register_forward_pre_hook(counting.enter)
        again.register_forward_hook(counting.leave)
    try:
        with counting, torch.enable_grad():
            torch.func.functional_call(module, state, (), dict(arguments))
    except Exception:  # an author's forward may read what there is not
        return None
    return counting.found


_SUMS = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Operators with another term of a sum before their two factors."""


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the products of a forward: each costs as much again for the gradient of each factor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = StepFlops(0, 0)
        self._open = 0

    def enter(self, *_: object) -> None:
        """A forward hook: what follows is recomputed."""
        self._open += 1

    def leave(self, *_: object) -> None:
        """A forward hook: the end of what is recomputed."""
        self._open -= 1

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            flops = formula(*args, **(kwargs or {}), out_val=out)
            first = int(func.overloadpacket in _SUMS)
            factors = args[first : first + 2]
            backward = flops * sum(factor.requires_grad for factor in factors)
            self.found += StepFlops(flops, backward, flops if self._open else 0)
        return out


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
