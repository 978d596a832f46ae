"""Built-in learning-rate schedules: factors of the base rate by the 0-based step.

The convention is that of Transformers' `get_*_schedule_with_warmup`: with a warm-up of w steps, step s < w
lies s / w of the way from `warmup_init` to the base rate, and step w is the first at the full rate. A decay
that runs to the end of N steps would reach `min_lr` at step N, one after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

from mm_core.errors import ConfigError

Fall = Callable[[float], float]
"""Progress of the decay in [0, 1] -> the share of the way down that is still to go, from 1 to 0."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, the full rate, then a decay that ends with the run.

    Args:
        warmup_steps: steps of the warm-up.
        start: the factor at step 0 of a warm-up.
        decay_from: the first step of the decay.
        total_steps: of the run; from here on the factor is `floor`, where there is a decay.
        floor: the factor that the decay ends at.
        fall: the decay's shape; None stays at the full rate for ever.
    """

    warmup_steps: int
    start: float
    decay_from: int = 0
    total_steps: int = 0
    floor: float = 0.0
    fall: Fall | None = None

    def factor(self, step: int) -> float:
        """The factor for the 0-based `step`."""
        if step < self.warmup_steps:
            return self.start + (1.0 - self.start) * step / self.warmup_steps
        if self.fall is None or step < self.decay_from:
            return 1.0
        if step >= self.total_steps:
            return self.floor
        progress = (step - self.decay_from) / (self.total_steps - self.decay_from)
        return self.floor + (1.0 - self.floor) * self.fall(progress)


class Shared(TypedDict, total=False):
    """What every schedule may be given beside the steps of its warm-up.

    Attributes:
        warmup_fraction: the warm-up's share of the run, instead of its steps.
        warmup_init: the rate at step 0 of a warm-up.
        min_lr: the rate that a decay ends at.
    """

    warmup_fraction: float | None
    warmup_init: float
    min_lr: float


def constant(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """Linear warm-up, then the base rate."""
    return schedule(total_steps, base_lr, warmup_steps, **shared)


def linear(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """Linear warm-up, then a straight line down to `min_lr`."""
    return schedule(total_steps, base_lr, warmup_steps, line, **shared)


def cosine(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """Linear warm-up, then half a cosine down to `min_lr`.

    Reference: https://arxiv.org/abs/1608.03983 (equation 5, one cycle).
    """
    return schedule(total_steps, base_lr, warmup_steps, half_cosine, **shared)


def polynomial(
    total_steps: int, base_lr: float, warmup_steps: int = 0, power: float = 2.0, **shared: Unpack[Shared]
) -> Schedule:
    """Linear warm-up, then (1 - progress)^power down to `min_lr`."""
    return schedule(total_steps, base_lr, warmup_steps, partial(falling_power, power), **shared)


def wsd(
    total_steps: int,
    base_lr: float,
    warmup_steps: int = 0,
    decay_fraction: float = 0.1,
    decay_shape: str = "sqrt",
    **shared: Unpack[Shared],
) -> Schedule:
    """Warm-up, stable, decay: the base rate until the last `decay_fraction` of the run falls to `min_lr`.

    Reference: https://arxiv.org/abs/2405.18392 (its "1-sqrt" is the shape `sqrt`).
    """
    warmup = warmup_length(total_steps, warmup_steps, shared.get("warmup_fraction"))
    decay = round(decay_fraction * total_steps)
    if warmup + decay > total_steps:
        raise ConfigError(
            f"the warm-up takes {warmup} steps and the decay {decay}, but the run has only {total_steps}",
            where="lr_schedule.decay_fraction",
            accepted=f"0 to {(total_steps - warmup) / max(1, total_steps):g}",
            hint="lower lr_schedule.decay_fraction or shorten the warm-up",
        )
    return schedule(total_steps, base_lr, warmup_steps, SHAPES[decay_shape], total_steps - decay, **shared)


def schedule(
    total_steps: int,
    base_lr: float,
    warmup_steps: int,
    fall: Fall | None = None,
    decay_from: int | None = None,
    **shared: Unpack[Shared],
) -> Schedule:
    """The schedule for rates as a config gives them. decay_from: None where the warm-up ends."""
    warmup = warmup_length(total_steps, warmup_steps, shared.get("warmup_fraction"))
    start = share(shared.get("warmup_init", 0.0), base_lr, "warmup_init")
    floor = share(shared.get("min_lr", 0.0), base_lr, "min_lr")
    return Schedule(warmup, start, warmup if decay_from is None else decay_from, total_steps, floor, fall)


def line(progress: float) -> float:
    """A straight line."""
    return 1.0 - progress


def half_cosine(progress: float) -> float:
    """Half a wave: flat at both ends."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def falling_sqrt(progress: float) -> float:
    """Steep at first: 1 - sqrt(progress)."""
    return 1.0 - math.sqrt(progress)


def falling_power(power: float, progress: float) -> float:
    """(1 - progress)^power."""
    return float((1.0 - progress) ** power)


SHAPES: dict[str, Fall] = {"linear": line, "sqrt": falling_sqrt, "cosine": half_cosine}


def warmup_length(total_steps: int, warmup_steps: int, warmup_fraction: float | None) -> int:
    """Steps of the warm-up; ConfigError when it would outlast the run."""
    if warmup_fraction is not None:
        return round(warmup_fraction * total_steps)
    if warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps is {warmup_steps}, but the run has only {total_steps} steps",
            where="lr_schedule.warmup_steps",
            accepted=f"0 to {total_steps}",
            hint="lower lr_schedule.warmup_steps or raise train.steps",
        )
    return warmup_steps


def share(rate: float, base_lr: float, key: str) -> float:
    """A learning rate as a factor of the base rate; ConfigError when it is above it."""
    if rate > base_lr:
        raise ConfigError(
            f"{key} is {rate:g}, which is more than the optimizer's rate of {base_lr:g}",
            where=f"lr_schedule.{key}",
            accepted=f"0 to {base_lr:g}",
            hint=f"{key} is a learning rate, not a share of one",
        )
    return rate / base_lr if base_lr else 0.0
