"""An optimizer whose state, and whose update, are in host memory, for parameters on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.device import synchronize
from mm_core.modules.shards import like, local


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer over copies of parameters in host memory: its step brings parameters and gradients there,
    updates, and brings the parameters back.

    Its parameter groups are those of the inner optimizer, and its state is named by the device's parameters.

    Args:
        make: makes the inner optimizer from the copies by name.
        parameters: on the device, plain tensors or DTensors, by name.
        pin_memory: use page-locked host memory where the device is not a CPU.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        pin_memory: bool,
    ) -> None:
        super().__init__([*parameters.values()], {})
        self._pins = pin_memory
        self._copies = {p: nn.Parameter(self._on_host(p)) for p in parameters.values()}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._inner = make({name: self._copies[p] for name, p in parameters.items()})
        self.param_groups = self._inner.param_groups

    def _on_host(self, parameter: nn.Parameter) -> Tensor:
        held = local(parameter)
        pins = self._pins and held.device.type != "cpu"
        host = torch.empty(held.shape, dtype=held.dtype, device="cpu", pin_memory=pins)
        return like(parameter, host.copy_(held))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters in host memory; `closure` recomputes the loss, as in torch."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for parameter, copy in self._copies.items():
            copy.grad = None
            if parameter.grad is not None:
                if parameter not in self._gradients:
                    self._gradients[parameter] = self._on_host(parameter)
                copy.grad = self._gradients[parameter]
                local(copy).copy_(local(parameter), non_blocking=True)
                local(copy.grad).copy_(local(parameter.grad), non_blocking=True)
        synchronize()
        self._inner.step()
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                local(parameter).copy_(local(copy), non_blocking=True)
                self.state[parameter] = self._inner.state[copy]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients on the device."""
        for parameter in self._copies:
            if not set_to_none and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
