"""The conformance kit of learning-rate schedules (`mm_core.contracts.LRSchedule`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mm_core.errors import MMError, plural
from mm_core.testing.kit import Kit, NotApplicable, Probe, checks_of

_STEPS = 40
_BASE_LR = 1e-3


def _built(probe: Probe, steps: int = _STEPS, base_lr: float = _BASE_LR) -> Any:
    """A new schedule of the small instance for a run of `steps` steps."""
    return probe.build(steps, base_lr)


def _factors(schedule: Any, steps: Iterable[int] = range(_STEPS)) -> dict[int, float]:
    return {step: schedule.factor(step) for step in steps}


def _sound(probe: Probe, found: dict[int, Any], run: int) -> None:
    """Expects factors that are numbers, finite and not negative."""
    for step, value in found.items():
        probe.expect(
            isinstance(value, (int, float)) and math.isfinite(value) and value >= 0,
            f"factor({step}) of a run of {plural(run, 'step')} returned {value!r}",
            accepted="a float, finite and not negative",
        )


def factors(probe: Probe) -> None:
    """The factor of every step of a run is a finite float that is not negative, and one is above 0."""
    found = _factors(_built(probe))
    _sound(probe, found, _STEPS)
    probe.expect(any(found.values()), f"the factor is 0 in all {_STEPS} steps of a run: nothing is trained")


def short_runs(probe: Probe) -> None:
    """Runs of 1, 2 and 3 steps have factors too, or the schedule refuses them with an MMError."""
    for steps in (1, 2, 3):
        try:
            schedule = _built(probe, steps)
        except MMError:
            continue
        what = f"a run of {plural(steps, 'step')}"
        accepted = "a factor for each step, or a ConfigError when the schedule is built"
        _sound(probe, probe.expect_no_error(what, accepted, _factors, schedule, range(steps)), steps)


def pure(probe: Probe) -> None:
    """The factor depends on the step alone: not on earlier calls, so a resumed run continues the curve."""
    schedule = _built(probe)
    forward = _factors(schedule)
    for words, found in (
        ("when steps are computed again", _factors(schedule)),
        ("when steps are computed backwards", _factors(_built(probe), reversed(range(_STEPS)))),
        ("when a run resumes in its middle", _factors(_built(probe), range(_STEPS // 2, _STEPS))),
    ):
        wrong = [step for step, value in found.items() if value != forward[step]]
        probe.expect(
            not wrong,
            f"factor({min(wrong, default=0)}) is a different one {words}",
            hint="compute the factor from the step alone, and keep no count of calls",
        )


def share_of_base_rate(probe: Probe) -> None:
    """factor returns a share of the base learning rate, not a rate."""
    peaks = [max(_factors(_built(probe, base_lr=rate)).values()) for rate in (_BASE_LR, 10 * _BASE_LR)]
    probe.expect(
        peaks[1] < 5 * peaks[0],  # floors given as rates may move a share a little, a rate is 10 times
        f"the largest factor is {peaks[0]:g} for base_lr {_BASE_LR:g}, and {peaks[1]:g} for ten times that",
        accepted="a share of the base learning rate, such as 1",
        hint="return the share: the engine multiplies it by the learning rate of each parameter group",
    )


def warmup(probe: Probe) -> None:
    """The factor never falls in the steps that the field `warmup_steps` gives, and rises over them."""
    steps = probe.config.options.get("warmup_steps")
    if not isinstance(steps, int) or steps < 1:
        raise NotApplicable("the small instance has no warmup_steps")
    schedule = _built(probe, max(_STEPS, 2 * steps))
    found = list(_factors(schedule, range(steps + 1)).values())
    probe.expect(
        sorted(found) == found and found[-1] > found[0],
        f"the factors of the {plural(steps, 'warm-up step')} and the next are"
        f" {[round(value, 4) for value in found]}",
        accepted="they rise",
    )


KIT = Kit(
    checks_of(__name__),
    arguments=lambda _: (_STEPS, _BASE_LR),
)
"""The conformance checks of learning-rate schedules."""
