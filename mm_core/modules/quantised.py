"""Linear layers of a frozen base in 8 or 4 bits: int8, fp8 (e4m3) and nf4.

int8 and fp8 have a scale for each row, nf4 one for each 64 numbers of a row (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314, without its second quantisation). Codes and scales are split by rows, so the
engine shards them like any other parameter. The codes are bytes, which mixed precision does not cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mm_core.contracts import TaskModule, WeightPlan
from mm_core.errors import PlanError, first_line, plural
from mm_core.modules.adapter_layers import adapted_layers, adapter_of, base_name
from mm_core.modules.shards import like_rows, local
from mm_core.modules.tying import tied_names

WHERE = "train.base_dtype"
_LARGEST = {"int8": 127.0, "fp8": 448.0, "nf4": 1.0}
_GROUP = 64
_CASTS_CODES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
_AT_ONCE = 2**28
"""Numbers of weights that are in memory at once, before they are quantised."""


def _levels() -> tuple[float, ...]:
    last = 1 - (1 / 30 + 1 / 32) / 2
    above = [NormalDist().inv_cdf(last + (0.5 - last) * i / 8) for i in range(8)]
    below = [-NormalDist().inv_cdf(last + (0.5 - last) * i / 7) for i in range(7)]
    return tuple(level / max(above) for level in sorted([*above, 0.0, *below]))


_LEVELS = _levels()
"""The 16 levels of nf4, from -1 to 1: quantiles of the normal distribution."""


def group_of(kind: str, columns: int) -> int:
    """How many numbers of a row share a scale."""
    return math.gcd(columns, _GROUP) if kind == "nf4" else columns


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The codes and scales of a weight.

    Args:
        weight: [out, in] float32.
        kind: int8, fp8 or nf4.

    Returns:
        Codes [out, in], for nf4 [out, in / 2], uint8 or int8; scales [out, groups] bf16.
    """
    grouped = weight.view(len(weight), -1, group_of(kind, weight.shape[1]))
    scale = (grouped.abs().amax(2) / _LARGEST[kind]).clamp_min(1e-30).bfloat16()
    units = (grouped / scale.float()[:, :, None]).view(weight.shape)
    if kind == "int8":
        return units.round().clamp(-127, 127).to(torch.int8), scale
    if kind == "fp8":
        return units.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    levels = torch.tensor(_LEVELS, device=weight.device)
    codes = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    low, high = codes.chunk(2, 1)
    return low | high << 4, scale


def dequantise(codes: Tensor, scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of `quantise`'s codes and scales, computed in `dtype`."""
    if kind == "int8":
        units = codes.to(dtype)
    elif kind == "fp8":
        units = codes.view(torch.float8_e4m3fn).to(dtype)
    else:
        levels = torch.tensor(_LEVELS, device=codes.device, dtype=dtype)
        halves = [
            levels.index_select(0, half.int().view(-1)).view(codes.shape) for half in (codes & 15, codes >> 4)
        ]
        units = torch.cat(halves, 1)
    grouped = units.view(len(units), scale.shape[1], -1) * scale.to(dtype)[:, :, None]
    return grouped.view(units.shape)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """A weight [out, in] with the values of a quantised base, in float32."""
    return dequantise(*quantise(weight.float(), kind), kind, torch.float32)


class _Product(torch.autograd.Function):
    """x W^T + b of a frozen W, which is computed from its codes in the forward and again in the backward.

    The codes are attributes of the context, not saved tensors: a streamed base replaces their memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        ctx.codes, ctx.scale, ctx.kind = codes, scale, kind
        return F.linear(x, dequantise(codes, scale, kind, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        return gradient @ dequantise(ctx.codes, ctx.scale, ctx.kind, gradient.dtype), None, None, None, None


class QuantisedLinear(nn.Linear):
    """A frozen linear layer [out, in] with a quantised weight.

    In `state_dict` its weight is a tensor without memory, of the full shape: weights files have such a
    tensor, and no checkpoint stores the codes.

    Args:
        layer: on the meta device.
        kind: int8, fp8 or nf4.
    """

    scale: nn.Parameter

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        codes, scale = quantise(torch.empty(layer.weight.shape, device="meta"), kind)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", layer.bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the input's dtype."""
        bias = self.bias if self.bias is None else self.bias.to(input.dtype)
        out: Tensor = _Product.apply(input, self.weight, self.scale, bias, self.kind)  # type: ignore[no-untyped-call]
        return out

    def reset_parameters(self) -> None:
        """Does nothing: a quantised weight comes from files."""

    def room(self) -> Tensor:
        """An empty float32 weight [out, in], sharded as the codes are."""
        share = local(self.weight)
        empty = torch.empty(len(share), self.in_features, device=share.device)
        return like_rows(self.weight, empty, self.out_features)

    def take(self, weight: Tensor) -> None:
        """Quantises a weight from `room`."""
        with torch.no_grad():
            for target, values in zip(
                (self.weight, self.scale), quantise(local(weight), self.kind), strict=True
            ):
                local(target).copy_(values)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        shape = (self.out_features, self.in_features)
        destination[f"{prefix}weight"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


def shard_codes(module: nn.Module, shard: Callable[[list[nn.Module]], object]) -> None:
    """Shards a module's quantised layers before the module, where `fully_shard` cannot shard them with it.

    Before torch 2.13 it makes all parameters require gradients first, and casts integers to param_dtype.

    Args:
        module: it is sharded next, and may have none.
        shard: `fully_shard` of modules in one group, without a dtype.
    """
    if not _CASTS_CODES:
        return
    quantised = [each for each in module.modules() if isinstance(each, QuantisedLinear)]
    layers: list[nn.Module] = [each for each in quantised if not isinstance(each, FSDPModule)]
    if not layers:
        return
    make = nn.Parameter.__new__

    def new(cls: type[nn.Parameter], data: Tensor | None = None, requires_grad: bool = True) -> Any:
        return make(cls, data, requires_grad and (data is None or data.is_floating_point()))

    with patch.object(nn.Parameter, "__new__", new):
        shard(layers)


def quantise_base(task: TaskModule, blocks: Iterable[str], kind: str) -> None:
    """Replaces the frozen linear layers in a task's blocks by quantised ones, on the meta device.

    Args:
        task: with its adapters in place.
        blocks: paths of modules in the task.
        kind: int8, fp8 or nf4.

    Raises:
        PlanError: an adapter needs the weights themselves.
    """
    for root in task.trainable:
        layers = adapted_layers(task.get_submodule(root))
        if kind == "nf4" and any(
            s.kind != "lora" for one in layers.values() for s in one.adapter_scales.values()
        ):
            raise PlanError(
                "PEFT's LoKr and LoHa read the shape of the weights below them, and those of nf4 are packed",
                where=WHERE,
                accepted="bf16, int8, fp8",
            )
        if needy := [
            path for path, layer in layers.items() if any(s.dora for s in layer.adapter_scales.values())
        ]:
            raise PlanError(
                f"DoRA of {root}.{needy[0]} needs the rows of its weight, which {kind} does not keep",
                where=WHERE,
                accepted="bf16, or adapters with dora: false",
            )
        if parts := [
            path for path, layer in layers.items() if "pissa" in " ".join(layer.adapter_inits.values())
        ]:
            raise PlanError(
                f"PiSSA of {root}.{parts[0]} starts from its weight, which {kind} does not keep",
                where=WHERE,
                accepted="bf16, or adapters with another init",
            )
    tied = {name for root in task.trainable for name in _tied(task, root)}
    for block in blocks:
        for path, layer in list(task.get_submodule(block).named_modules(prefix=block)):
            name = f"{path}.weight"
            plain = type(layer) is nn.Linear and adapter_of(name) is None and name not in tied
            if plain and not layer.weight.requires_grad and group_of(kind, layer.in_features) % 2 == 0:
                task.set_submodule(path, QuantisedLinear(layer, kind))


def check_device(task: TaskModule, device: torch.device) -> None:
    """Refuses a quantised base that a device cannot compute with: it lacks the dtype.

    Args:
        task: with its quantised layers.
        device: the device that will compute.

    Raises:
        PlanError: quantising and computing back a few numbers fails there.
    """
    layers = quantised_layers({root: task.get_submodule(root) for root in task.trainable})
    for kind in sorted({layer.kind for layer in layers.values()}):
        try:
            codes, scale = quantise(torch.ones(1, _GROUP, device=device), kind)
            dequantise(codes, scale, kind, torch.bfloat16).sum().item()
        except (RuntimeError, TypeError) as fault:
            raise PlanError(
                f"{device} cannot compute with a base in {kind}: {first_line(fault)}",
                where=WHERE,
                accepted=", ".join(["bf16", *(other for other in _LARGEST if other != kind)]),
            ) from fault


def _tied(task: TaskModule, root: str) -> list[str]:
    found = tied_names(task.get_submodule(root))
    return [f"{root}.{name}" for names in found.items() for name in names]


def quantised_layers(modules: Mapping[str, nn.Module]) -> dict[str, QuantisedLinear]:
    """The quantised layers in modules, by the path of their weight.

    Args:
        modules: by path.
    """
    return {
        f"{root}.{path}.weight": layer
        for root, module in modules.items()
        for path, layer in module.named_modules()
        if isinstance(layer, QuantisedLinear)
    }


def scale_names(module: nn.Module, prefix: str) -> set[str]:
    """Paths of the scales of quantised layers, which no random initialisation fills."""
    return {f"{name.removesuffix('weight')}scale" for name in quantised_layers({prefix: module})}


def fill_state(weights: WeightPlan, state: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Fills a state with weights, and quantises those of quantised layers, some of them at a time.

    Args:
        weights: the weights.
        state: tensors by path in the task.
        modules: the trained components, by path in the task.
    """
    layers = {name: layer for name, layer in quantised_layers(modules).items() if name in state}
    weights.fill({name: tensor for name, tensor in state.items() if name not in layers})
    for names in _groups(layers):
        rooms = {name: layers[name].room() for name in names}
        weights.fill(rooms)
        for name, room in rooms.items():
            layers[name].take(room)


def _groups(layers: Mapping[str, QuantisedLinear]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, layer in layers.items():
        group.append(name)
        size += layer.in_features * layer.out_features
        if size >= _AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def check_in_files(task: TaskModule, kept: Iterable[str]) -> None:
    """Refuses a quantised base that checkpoints would have to store.

    Args:
        task: the task.
        kept: names of the weights that checkpoints leave in their files.

    Raises:
        PlanError: a quantised weight is not among them.
    """
    layers = quantised_layers({root: task.get_submodule(root) for root in task.trainable})
    if stored := sorted(layers.keys() - set(kept)):
        raise PlanError(
            f"checkpoints would have to store {plural(len(stored), 'quantised weight')}, such as"
            f" {base_name(stored[0])}: {next(iter(layers.values())).kind} works only for a base that stays in"
            " its files",
            where=WHERE,
            accepted="a base from init_from or from_pretrained, with checkpoint.frozen not true",
        )
