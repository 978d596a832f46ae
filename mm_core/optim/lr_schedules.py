"""Built-in learning-rate schedules: factors of the base rate by the 0-based step.

The convention is that of Transformers' `get_*_schedule_with_warmup`: with a warm-up of w steps, step s < w
is s / w of the way from `warmup_init` to the base rate, and step w is the first at the full rate. With
`warmup_type` log it is log(s + 1) / log(w) of the way, so step w - 1 has the full rate already. A decay over
a run of N steps would reach `min_lr` at step N, one after the last. Trainers that count the steps of a
warm-up from the first call of their scheduler, after a step, are one step behind: they train steps 0 and 1
with the lowest rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

from mm_core.errors import ConfigError, plural

Fall = Callable[[float], float]
"""Progress of the decay in [0, 1] -> remaining share of the decay, from 1 to 0."""


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: warm-up, the full rate, then a decay until the end of the run.

    Args:
        warmup_steps: steps of the warm-up.
        start: factor at step 0 of a warm-up.
        decay_from: first step of the decay.
        total_steps: steps of the run; after a decay, the factor stays at `floor`.
        floor: factor at the end of the decay.
        fall: shape of the decay; None keeps the full rate.
        logarithmic: the warm-up rises with the logarithm of the step, not in a straight line.
    """

    warmup_steps: int
    start: float
    decay_from: int = 0
    total_steps: int = 0
    floor: float = 0.0
    fall: Fall | None = None
    logarithmic: bool = False

    def factor(self, step: int) -> float:
        """The learning rate's factor at the 0-based `step`."""
        if step < self.warmup_steps:
            if self.logarithmic:
                return self.start + (1.0 - self.start) * math.log(step + 1) / math.log(
                    max(2, self.warmup_steps)
                )
            return self.start + (1.0 - self.start) * step / self.warmup_steps
        if self.fall is None or step < self.decay_from:
            return 1.0
        if step >= self.total_steps:
            return self.floor
        progress = (step - self.decay_from) / (self.total_steps - self.decay_from)
        return self.floor + (1.0 - self.floor) * self.fall(progress)


class Shared(TypedDict, total=False):
    """Options of every learning-rate schedule, beside the steps of its warm-up.

    Attributes:
        warmup_fraction: the warm-up's share of the run, instead of its steps.
        warmup_init: learning rate at step 0 of a warm-up.
        warmup_type: shape of the warm-up, `linear` or `log`.
        min_lr: learning rate at the end of a decay.
    """

    warmup_fraction: float | None
    warmup_init: float
    warmup_type: str
    min_lr: float


def constant(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """A learning-rate schedule: linear warm-up, then the base rate.

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        shared: further options, see `Shared`.
    """
    return schedule(total_steps, base_lr, warmup_steps, **shared)


def linear(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """A learning-rate schedule: linear warm-up, then a straight line down to `min_lr`.

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        shared: further options, see `Shared`.
    """
    return schedule(total_steps, base_lr, warmup_steps, line, **shared)


def cosine(total_steps: int, base_lr: float, warmup_steps: int = 0, **shared: Unpack[Shared]) -> Schedule:
    """A learning-rate schedule: linear warm-up, then half a cosine down to `min_lr`.

    Reference: https://arxiv.org/abs/1608.03983 (equation 5, one cycle).

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        shared: further options, see `Shared`.
    """
    return schedule(total_steps, base_lr, warmup_steps, half_cosine, **shared)


def polynomial(
    total_steps: int, base_lr: float, warmup_steps: int = 0, power: float = 2.0, **shared: Unpack[Shared]
) -> Schedule:
    """A learning-rate schedule: linear warm-up, then (1 - progress)^power down to `min_lr`.

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        power: exponent of the decay; 1 is a straight line.
        shared: further options, see `Shared`.
    """
    return schedule(total_steps, base_lr, warmup_steps, partial(falling_power, power), **shared)


def wsd(
    total_steps: int,
    base_lr: float,
    warmup_steps: int = 0,
    decay_fraction: float = 0.1,
    decay_shape: str = "sqrt",
    **shared: Unpack[Shared],
) -> Schedule:
    """A learning-rate schedule: warm-up, base rate, then a decay to `min_lr` in the last part of the run.

    Reference: https://arxiv.org/abs/2405.18392 (its "1-sqrt" is the shape `sqrt`).

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        decay_fraction: the decay's share of the run.
        decay_shape: shape of the decay, one of `SHAPES`.
        shared: further options, see `Shared`.

    Raises:
        ConfigError: warm-up and decay together are longer than the run.
    """
    warmup = warmup_length(total_steps, warmup_steps, shared.get("warmup_fraction"))
    decay = round(decay_fraction * total_steps)
    if warmup + decay > total_steps:
        raise ConfigError(
            f"the warm-up has {plural(warmup, 'step')} and the decay {decay}, but the run has only"
            f" {total_steps}",
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
    """Builds a learning-rate schedule from the options in a config.

    Args:
        total_steps: steps of the run.
        base_lr: the optimizer's learning rate.
        warmup_steps: steps of the warm-up.
        fall: shape of the decay; None for no decay.
        decay_from: first step of the decay; None for the end of the warm-up.
        shared: further options, see `Shared`.

    Raises:
        ConfigError: a warm-up longer than the run, or a rate above the base rate.
    """
    warmup = warmup_length(total_steps, warmup_steps, shared.get("warmup_fraction"))
    start = share(shared.get("warmup_init", 0.0), base_lr, "warmup_init")
    floor = share(shared.get("min_lr", 0.0), base_lr, "min_lr")
    log = shared.get("warmup_type") == "log"
    return Schedule(
        warmup, start, warmup if decay_from is None else decay_from, total_steps, floor, fall, log
    )


@dataclass(frozen=True)
class OneCycle:
    """A learning-rate schedule that rises to the full rate, falls back, then decays with 1 / (1 + steps).

    Args:
        low: factor at both ends of the cycle.
        first: steps of the rise.
        second: steps of the fall.
        stairs: levels of the rise and of the fall; 0 for a straight line.
        decay: added to the divisor of `low` by each step after the cycle.
    """

    low: float
    first: int
    second: int
    stairs: tuple[int, int]
    decay: float

    def factor(self, step: int) -> float:
        """The learning rate's factor at the 0-based `step`."""
        left = self.first + self.second - step
        if left <= 0:
            return self.low / (1.0 - self.decay * left)
        rises = step <= self.first
        part, whole = (step, self.first) if rises else (left, self.second)
        stairs = self.stairs[0 if rises else 1]
        height = part * stairs // whole / stairs if stairs else part / whole
        return self.low + (1.0 - self.low) * height


@dataclass(frozen=True)
class RangeTest:
    """A learning-rate schedule that rises without end, to find the largest rate that trains.

    Args:
        step_size: steps in which the factor rises by `step_rate`.
        step_rate: rise of the factor, from 1.
        staircase: the rate rises at once at the end of `step_size` steps.
    """

    step_size: int
    step_rate: float
    staircase: bool

    def factor(self, step: int) -> float:
        """The learning rate's factor at the 0-based `step`."""
        interval = step // self.step_size if self.staircase else step / self.step_size
        return 1.0 + self.step_rate * interval


def one_cycle(
    total_steps: int,
    base_lr: float,
    min_lr: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    decay_lr_rate: float = 0.0,
) -> OneCycle:
    """A learning-rate schedule: from `min_lr` up to the base rate and back, then a decay below `min_lr`.

    Only the learning rate cycles; the optimizer's momentum stays as configured.

    Reference: https://arxiv.org/abs/1803.09820

    Args:
        total_steps: steps of the run; the cycle has a length of its own.
        base_lr: the optimizer's learning rate, the peak of the cycle.
        min_lr: learning rate at both ends of the cycle.
        cycle_first_step_size: steps of the rise.
        cycle_second_step_size: steps of the fall; None for as many.
        cycle_first_stair_count: levels of the rise; 0 for a straight line.
        cycle_second_stair_count: levels of the fall; None for as many.
        decay_step_size: steps in which the decay's divisor grows by `decay_lr_rate`; 0 for no decay.
        decay_lr_rate: growth of the divisor.

    Raises:
        ConfigError: `min_lr` is above the base rate.
    """
    second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
    fall = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    decay = decay_lr_rate / decay_step_size if decay_step_size else 0.0
    low = share(min_lr, base_lr, "min_lr")
    return OneCycle(low, cycle_first_step_size, second, (cycle_first_stair_count, fall), decay)


def lr_range_test(
    total_steps: int,
    base_lr: float,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> RangeTest:
    """A learning-rate schedule: from the base rate up, by the same amount at each step or stair.

    Reference: https://arxiv.org/abs/1803.09820

    Args:
        total_steps: steps of the run; the rate rises until its end.
        base_lr: the optimizer's learning rate, where the test starts.
        lr_range_test_step_size: steps in which the rate rises by that share of the base rate.
        lr_range_test_step_rate: rise in `lr_range_test_step_size` steps, as a multiple of the base rate.
        lr_range_test_staircase: the rate rises at once after `lr_range_test_step_size` steps.
    """
    return RangeTest(lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase)


def line(progress: float) -> float:
    """Shape of a learning-rate decay: a straight line."""
    return 1.0 - progress


def half_cosine(progress: float) -> float:
    """Shape of a learning-rate decay: half a cosine wave, flat at both ends."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def falling_sqrt(progress: float) -> float:
    """Shape of a learning-rate decay: 1 - sqrt(progress), steep at first."""
    return 1.0 - math.sqrt(progress)


def falling_power(power: float, progress: float) -> float:
    """Shape of a learning-rate decay: (1 - progress)^power."""
    return float((1.0 - progress) ** power)


SHAPES: dict[str, Fall] = {"linear": line, "sqrt": falling_sqrt, "cosine": half_cosine}


def warmup_length(total_steps: int, warmup_steps: int, warmup_fraction: float | None) -> int:
    """The number of steps in a learning-rate warm-up.

    Raises:
        ConfigError: the warm-up would be longer than the run.
    """
    if warmup_fraction is not None:
        return round(warmup_fraction * total_steps)
    if warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps is {warmup_steps}, but the run has only {plural(total_steps, 'step')}",
            where="lr_schedule.warmup_steps",
            accepted=f"0 to {total_steps}",
            hint="lower lr_schedule.warmup_steps or raise train.steps",
        )
    return warmup_steps


def share(rate: float, base_lr: float, key: str) -> float:
    """A learning rate as a share of the base rate.

    Raises:
        ConfigError: it is above the base rate.
    """
    if rate > base_lr:
        raise ConfigError(
            f"{key} is {rate:g}, which is above the optimizer's learning rate {base_lr:g}",
            where=f"lr_schedule.{key}",
            accepted=f"0 to {base_lr:g}",
            hint=f"lower it: {key} is a learning rate, not a share of one",
        )
    return rate / base_lr if base_lr else 0.0
