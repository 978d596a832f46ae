"""An exponential moving average of the weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mm_core.config.sections import EMASection
from mm_core.contracts import Shard


class EMA:
    """The exponential moving average (EMA) of this rank's shards of the weights, in float32.

    Ranks do not communicate for it. After n updates, the next one keeps the share d = decay^every of the
    average, or (1 + n) / (10 + n) while that is less and `ramp` is on, and adds 1 - d of the weights.

    Args:
        shards: the engine's `shards`, called whenever the weights are read or written.
        settings: the config's section. On the device, an update waits for nothing; on the CPU, it waits for
            a copy of the weights.
    """

    def __init__(self, shards: Callable[[], Iterable[Shard]], settings: EMASection) -> None:
        self.updates = 0
        self._shards = shards
        self._settings = settings
        device = "cpu" if settings.device == "cpu" else None
        self._averages = {s.name: s.master.to(device, torch.float32, copy=True) for s in shards()}
        weights = [shard.master for shard in shards()]
        self._same = all(w.dtype == torch.float32 and (device is None or w.is_cpu) for w in weights)

    def update(self, step: int) -> None:
        """Updates the average of the weights after `step` steps, if an update is due."""
        if step % self._settings.every:
            return
        averages, weights = [*self._averages.values()], [shard.master for shard in self._shards()]
        if not self._same:
            weights = [w.to(a.device, torch.float32) for w, a in zip(weights, averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
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
        weights = [shard.master for shard in self._shards()]
        averages = [*self._averages.values()]
        saved = [w.to(a.device, copy=True) for w, a in zip(weights, averages, strict=True)]
        try:
            torch._foreach_copy_(weights, averages)
            yield
        finally:
            torch._foreach_copy_(weights, saved)

    def state_dict(self) -> dict[str, Tensor]:
        """The average of the weights by path in the task, to save to a checkpoint or to load into.

        These are live tensors, sharded like the parameters; `updates` is not among them.
        """
        return {shard.name: shard.stored(self._averages[shard.name]) for shard in self._shards()}

    def reset(self) -> None:
        """Restarts the average from the current weights."""
        for shard in self._shards():
            self._averages[shard.name].copy_(shard.master)
        self.updates = 0
