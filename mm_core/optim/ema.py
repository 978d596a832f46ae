"""An exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mm_core.config.sections import EMASection
from mm_core.modules.shards import local


class EMA:
    """Float32 shadows of the weights that this rank holds; no rank asks another for anything.

    After n updates the next one keeps the share d = decay^every of the average, or (1 + n) / (10 + n) while
    that is less and `ramp` is on, and takes 1 - d of the weights.

    Args:
        parameters: plain tensors or DTensors, by path in the task; frozen ones have no average.
        settings: the config's section. On the device the update waits for nothing; kept on the CPU, the
            weights have to come there first.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: EMASection) -> None:
        self.updates = 0
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self._shadows = {name: self._shadow(parameter) for name, parameter in self._parameters.items()}

    def update(self, step: int) -> None:
        """Takes in the weights as they are after `step` steps, when an update is due then."""
        if step % self._settings.every:
            return
        shadows = list(map(local, self._shadows.values()))
        weights = [
            local(parameter).to(shadow.device, torch.float32)
            for parameter, shadow in zip(self._parameters.values(), shadows, strict=True)
        ]
        torch._foreach_lerp_(shadows, weights, 1.0 - self.decay)
        self.updates += 1

    @property
    def decay(self) -> float:
        """The share of itself that the average keeps at the next update."""
        decay = self._settings.decay**self._settings.every
        return min(decay, (1 + self.updates) / (10 + self.updates)) if self._settings.ramp else decay

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The average in place of the weights, which come back bit for bit; the true weights lie beside the
        average meanwhile. To be entered outside of `Engine.evaluating`, which drops what it has gathered."""
        weights = list(map(local, self._parameters.values()))
        shadows = list(map(local, self._shadows.values()))
        saved = [w.to(s.device, copy=True) for w, s in zip(weights, shadows, strict=True)]
        try:
            torch._foreach_copy_(weights, shadows)
            yield
        finally:
            torch._foreach_copy_(weights, saved)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by path in the task: live tensors, sharded as the parameters, to save or load into.
        `updates` is not among them."""
        return dict(self._shadows)

    def reset(self) -> None:
        """Begins anew from the weights as they are."""
        for name, parameter in self._parameters.items():
            local(self._shadows[name]).copy_(local(parameter))
        self.updates = 0

    def _shadow(self, parameter: nn.Parameter) -> Tensor:
        device = "cpu" if self._settings.device == "cpu" else parameter.device
        return parameter.detach().to(device=device, dtype=torch.float32, copy=True)
