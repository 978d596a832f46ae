"""Steps over this rank's shards as plain tensors.

Over DTensors, the same numbers take the host five times as long: a millisecond for each 50 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mm_core.modules.shards import like

_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Optimizers that treat each element alone and have no state before their first step."""


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of the gradients, those that there are, in their memory."""
    found = [p.grad for p in parameters]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in found if gradient is not None]


def skips(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the optimizer leaves out a step where a tensor on the device orders it: torch's fused ones."""
    if type(optimizer) not in _ELEMENTWISE or optimizer is None:
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


class GlobalNorm:
    """The L2 norm of all gradients of sharded parameters, the same bits as `get_total_norm` of the DTensors.

    Args:
        parameters: of which all or some get gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._group = _group_of(parameters)

    def __call__(self) -> Tensor:
        """The norm, [], on the gradients' device. A collective if they are sharded."""
        gradients = local_gradients(self._parameters)
        if self._group is None or not gradients:
            return self._of_all_kinds()
        squares = torch.stack(torch._foreach_norm(gradients, 2.0)) ** 2.0
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(squares, group=self._group)
        return torch.linalg.vector_norm(squares**0.5, 2.0)  # type: ignore[no-any-return]

    def _of_all_kinds(self) -> Tensor:
        whole = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _group_of(parameters: Sequence[nn.Parameter]) -> dist.ProcessGroup | None:
    """The ranks over which all parameters are sharded, in one dtype; None if they are not all alike."""
    if not all(isinstance(p, DTensor) for p in parameters):
        return None
    held: Sequence[Any] = parameters
    specs = {(p.device_mesh, tuple(map(type, p.placements)), p.dtype, p.device) for p in held}
    if len(specs) != 1:
        return None
    ((mesh, places, *_),) = specs
    group: dist.ProcessGroup | None = (
        mesh.get_group(places.index(Shard)) if places.count(Shard) == 1 else None
    )
    return group


class LocalSteps:
    """Makes an optimizer over DTensors step over plain views of this rank's shards, if it treats each element
    alone. Its groups then have the views, in the same order, and its state is that of the views.

    Gradients remain those of the parameters: the optimizer's `step` takes them, its `zero_grad` clears them.

    Args:
        optimizer: it has taken no step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._views: dict[nn.Parameter, nn.Parameter] = {}
        held: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        if type(optimizer) not in _ELEMENTWISE or not all(isinstance(p, DTensor) for p in held):
            return
        self._memory = [p._local_tensor for p in held]
        self._views = {p: nn.Parameter(p._local_tensor.detach(), p.requires_grad) for p in held}
        self._pairs: list[tuple[Any, nn.Parameter]] = [*self._views.items()]
        for group in optimizer.param_groups:
            group["params"] = [self._views[p] for p in group["params"]]
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.zero_grad = self._clear  # type: ignore[method-assign]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, sharded like it, in the optimizer's memory."""
        view = self._views.get(parameter, parameter)
        own, state = view is parameter, self._optimizer.state.get(view, {}).items()
        return {key: value if own or key == "step" else like(parameter, value) for key, value in state}

    def _take_gradients(self, *_: object) -> None:
        memory = self._memory
        for index, (parameter, view) in enumerate(self._pairs):
            share = parameter._local_tensor
            if share is not memory[index]:  # FSDP2 moves shards into its own memory at the first forward
                view.data = memory[index] = share
            gradient = parameter.grad
            view.grad = None if gradient is None else gradient._local_tensor

    def _clear(self, set_to_none: bool = True) -> None:
        for parameter, view in self._pairs:
            parameter.grad = view.grad = None
