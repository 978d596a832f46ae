"""FLOPs of a training step, from the products of a forward and the trained parameters."""

from __future__ import annotations

import copy
import functools
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


def counted_products(module: nn.Module, arguments: Mapping[str, Any]) -> list[ModuleFlops] | None:
    """The products of a forward, by torch's formulas; None if it fails without numbers.

    Each takes all before it for what its input depends on.

    Args:
        module: on the meta device, but for its buffers.
        arguments: of the forward, with tensors on the meta device.
    """
    module = copy.deepcopy(module)  # a forward may keep tensors, which would be without numbers
    counting = _Products(module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    try:
        with counting:
            torch.func.functional_call(module, state, (), dict(arguments))
    except Exception:  # an author's forward may read what there is not
        return None
    return counting.found


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the products of a forward, each with the innermost module that computes it. Those of an
    adapted layer's adapters are left out: `step_flops` adds them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[ModuleFlops] = []
        self._adapted = adapted_layers(module)
        self._open: list[tuple[str, nn.Module]] = []
        for path, each in module.named_modules():
            each.register_forward_pre_hook(functools.partial(self._enter, path), with_kwargs=True)
            each.register_forward_hook(self._leave)

    def _enter(self, path: str, module: nn.Module, *_: object) -> None:
        self._open.append((path, module))

    def _leave(self, *_: object) -> None:
        self._open.pop()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            path, module = self._open[-1]
            layer = next((one for one in _paths(path) if one in self._adapted), None)
            if layer is None or path == f"{layer}.base_layer":
                weighs = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
                second = None if weighs else tuple(dict.fromkeys(one.module for one in self.found))
                flops = formula(*args, **(kwargs or {}), out_val=out)
                self.found.append(ModuleFlops(layer or path, flops, second=second))
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
