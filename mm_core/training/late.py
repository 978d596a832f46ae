"""Training steps whose norm the host reads after the next forward and backward, so that no step waits for it.

The order is that of a step in `run_steps`, shifted: the device has updated, or has left that out, before the
host knows. The next update is issued after the host has judged this one, so that a run has the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from mm_core.contracts import Loss, SupportsBeginStep, SupportsUpdate
from mm_core.device import copied_to_host
from mm_core.errors import MMError
from mm_core.training.loop import Training
from mm_core.training.step import IssuedStep, end_step


class LateSteps:
    """Ends the steps of a run late."""

    def __init__(self, training: Training, engine: SupportsUpdate) -> None:
        self._training, self._engine = training, engine
        self._unread: tuple[IssuedStep, Callable[[], tuple[float, list[Loss]]]] | None = None
        training.between.settled = self.rescued

    def end(self, issued: IssuedStep, losses: Sequence[Loss]) -> bool:
        """Ends the step before; updates with the gradients of this one. Whether the run ends after it.

        Args:
            issued: the step.
            losses: of its micro-batches.
        """
        training, between = self._training, self._training.between
        if self._finish()[0]:  # looking for the fault has changed the gradients of this step
            self._begin(issued.step)
            training.engine.discard()
            last = issued.forwards[-1]
            losses = [
                training.engine.micro_step(forward, last=forward is last, scale=issued.scale)
                for forward in issued.forwards
            ]
        training.reporter.enter("optimizer")
        norm = self._engine.update(training.clip_grad_norm)
        self._unread = issued, on_host(norm, losses)
        between.step, step = issued.step + 1, issued.step + 1
        now = between.follows(step, stop=issued.agreed.stop, save=issued.agreed.save)
        return self._finish()[1] if now else False

    def rescued(self) -> bool:
        """Ends the last step of a run that an error ends; false if it did not update."""
        try:
            self._finish()
        except MMError:
            return False
        return True

    def _begin(self, step: int) -> None:
        if isinstance(self._training.task, SupportsBeginStep):
            self._training.task.begin_step(step)

    def _finish(self) -> tuple[bool, bool]:
        """Ends the step whose norm is not read; whether gradients were cleared, and whether the run ends."""
        if self._unread is None:
            return False, False
        training, (issued, read), self._unread = self._training, self._unread, None
        step = training.between.step = issued.step
        grad_norm, losses = read()
        if not isfinite(grad_norm):
            self._begin(step)
        refused = training.guard.judge(step, grad_norm, losses, issued.batches, issued.forwards)
        self._engine.settled()
        return refused is not None, end_step(training, issued, losses, grad_norm, refused)


def late_steps(training: Training) -> Callable[[IssuedStep, Sequence[Loss]], bool] | None:
    """How the steps of a run end late; None where the host must know the norm before the update."""
    engine = training.engine
    if not isinstance(engine, SupportsUpdate) or not engine.late or training.guard.settings.spike is not None:
        return None
    return LateSteps(training, engine).end


def on_host(norm: Tensor, losses: Sequence[Loss]) -> Callable[[], tuple[float, list[Loss]]]:
    """Begins to copy a step's norm and losses to the host; returns a function that waits for them."""
    numbers = [norm]
    for loss in losses:
        numbers += [loss.total, *loss.metrics.values(), *([] if loss.bins is None else [loss.bins])]
    flat = [number.detach().to(norm.device, torch.float32).reshape(-1) for number in numbers]
    arrived = copied_to_host(torch.cat(flat))

    def read() -> tuple[float, list[Loss]]:
        parts = iter(torch.split(arrived(), [len(part) for part in flat]))
        value = float(next(parts))
        found = []
        for loss in losses:
            total, metrics = next(parts)[0], {name: next(parts)[0] for name in loss.metrics}
            bins = None if loss.bins is None else next(parts).view_as(loss.bins)
            found.append(replace(loss, total=total, metrics=metrics, bins=bins))
        return value, found

    return read
