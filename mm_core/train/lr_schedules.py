"""Built-in learning-rate schedules: factors of the base rate by the 0-based step.

The convention is that of Transformers' `get_*_schedule_with_warmup`: with a warm-up of w steps, step s < w
has the factor s / w, so the first step has 0 and moves nothing, and step w is the first at the full rate.
"""

from __future__ import annotations

import math

from mm_core.errors import ConfigError


class Constant:
    """Linear warm-up from 0 over `warmup_steps`, then 1."""

    def __init__(self, total_steps: int, warmup_steps: int = 0) -> None:
        check_warmup(total_steps, warmup_steps)
        self.warmup_steps = warmup_steps

    def factor(self, step: int) -> float:
        """The factor for the 0-based `step`."""
        return step / self.warmup_steps if step < self.warmup_steps else 1.0


class Cosine:
    """Linear warm-up from 0 over `warmup_steps`, then half a cosine from 1 down to `min_lr_ratio`.

    Reference: https://arxiv.org/abs/1608.03983 (equation 5, one cycle).
    """

    def __init__(self, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> None:
        check_warmup(total_steps, warmup_steps)
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio

    def factor(self, step: int) -> float:
        """The factor for the 0-based `step`; beyond `total_steps` it stays at `min_lr_ratio`."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        wave = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * wave


def check_warmup(total_steps: int, warmup_steps: int) -> None:
    """ConfigError when the warm-up would outlast the run."""
    if warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps is {warmup_steps}, but the run has only {total_steps} steps",
            where="lr_schedule.warmup_steps",
            accepted=f"0 to {total_steps}",
            hint="lower lr_schedule.warmup_steps or raise train.steps",
        )
