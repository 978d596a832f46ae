"""One rank without shards: which tasks it trains so, and the same order of sums as with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.contracts import TaskModule, torch_dtype
from mm_core.modules.torch_calls import Args, Kwargs


def needs_no_shards(task: TaskModule, roots: Iterable[str], config: FSDP2Config) -> bool:
    """Whether one rank trains components as they are: fully_shard would cast nothing and only make copies.

    Args:
        task: the task.
        roots: its trained components.
        config: the engine's, which may ask for shards, or for weights that come for a module's call.
    """
    names = config.param_dtype, config.reduce_dtype, config.output_dtype
    found = {parameter.dtype for root in roots for parameter in task.get_submodule(root).parameters()}
    one = len(found.union(torch_dtype(name) for name in names if name)) == 1
    asked = config.sharding_size == 1 or config.base.stream or config.offloads_parameters()
    return one and not asked and all(dtype.is_floating_point for dtype in found)


class _Node(torch.autograd.Function):
    """Its inputs, unchanged."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def enter_as_one(modules: Iterable[nn.Module]) -> None:
    """Makes the inputs of each module one node of the graph, as fully_shard does: gradients of what several
    modules get (a text, for blocks) are summed in each of them first, so training has the same bits."""

    def hook(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        values, form = tree_flatten((args, kwargs))
        places = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        if not places or not torch.is_grad_enabled():
            return None
        passed: Sequence[Tensor] = _Node.apply(*(values[i] for i in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, passed, strict=True):
            values[place] = tensor
        changed: tuple[Args, Kwargs] = tree_unflatten(values, form)
        return changed

    for module in modules:
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
