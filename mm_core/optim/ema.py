"""An exponential moving average of the weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mm_core.config.sections import EMASection
from mm_core.modules.shards import local


class EMA:
    """The exponential moving average (EMA) of this rank's shards of the weights, in float32.

    Ranks do not communicate for it. After n updates, the next one keeps the share d = decay^every of the
    average, or (1 + n) / (10 + n) while that is less and `ramp` is on, and adds 1 - d of the weights.

    Args:
        parameters: plain tensors or DTensors, by path in the task; frozen ones have no average.
        settings: the config's section. On the device, an update waits for nothing; on the CPU, it waits for
            a copy of the weights.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: EMASection) -> None:
        self.updates = 0
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self._shadows = {name: self._shadow(parameter) for name, parameter in self._parameters.items()}

    def update(self, step: int) -> None:
        """Updates the average of the weights after `step` steps, if an update is due."""
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
        """The share of the weights' average that the next update keeps."""
        decay = self._settings.decay**self._settings.every
        return min(decay, (1 + self.updates) / (10 + self.updates)) if self._settings.ramp else decay

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the average replaces the weights; afterwards they are restored bit for bit.

        The weights are kept on the average's device meanwhile. Enter it outside `Engine.evaluating`, which
        drops gathered tensors at its end.
        """
        weights = list(map(local, self._parameters.values()))
        shadows = list(map(local, self._shadows.values()))
        saved = [w.to(s.device, copy=True) for w, s in zip(weights, shadows, strict=True)]
        try:
            torch._foreach_copy_(weights, shadows)
            yield
        finally:
            torch._foreach_copy_(weights, saved)

    def state_dict(self) -> dict[str, Tensor]:
        """The average of the weights by path in the task, to save to a checkpoint or to load into.

        These are live tensors, sharded like the parameters; `updates` is not among them.
        """
        return dict(self._shadows)

    def reset(self) -> None:
        """Restarts the average from the current weights."""
        for name, parameter in self._parameters.items():
            local(self._shadows[name]).copy_(local(parameter))
        self.updates = 0

    def _shadow(self, parameter: nn.Parameter) -> Tensor:
        device = "cpu" if self._settings.device == "cpu" else parameter.device
        return parameter.detach().to(device=device, dtype=torch.float32, copy=True)
