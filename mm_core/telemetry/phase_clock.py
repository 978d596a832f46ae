"""Measures the time that training steps spend in each phase, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from mm_core.device import DeviceClock, device_type, environment_world
from mm_core.processes import CoreWaits

T = TypeVar("T")

OWN = ("data", "encode", "forward_backward", "optimizer")
"""The phases in which a rank works on its share; in the others it waits, or does what only one rank does."""

STEPS = 25
"""Latest steps whose own time is known."""


class PhaseClock:
    """Measures the seconds that training steps spend in each phase (`data`, `encode`, `optimizer` ...), and
    how many of them a rank spends on its own share: not in collectives, where it waits for the slowest rank,
    and on CPU not without a core.

    On an accelerator it times the device's queue with events that are read later.

    Args:
        clock: marks points in time; by default the device's own clock.
        watch: called with the name of each phase (the watchdog).
    """

    def __init__(self, clock: DeviceClock | None = None, watch: Callable[[str], None] | None = None) -> None:
        self._clock = clock or DeviceClock()
        self._watch = watch
        # A phase; the step if the time is this rank's own, else 0; the device's clock; waits for a core.
        self._marks: list[tuple[str, int, object, float]] = []
        on_cpu = device_type() == "cpu"
        shared = clock is None and on_cpu and environment_world().world_size > 1
        self._coreless: Callable[[], float] = CoreWaits() if shared else lambda: 0.0
        self._every = 1 if on_cpu else 5  # a collective costs two events of the device
        self._steps = 0
        self._own: dict[int, float] = {}  # of the steps that had collectives

    def enter(self, phase: str) -> None:
        """Begins a phase of the training step and ends the phase before it."""
        if not self._marks or self._marks[-1][0] != phase:  # else it goes on: only the watchdog is notified
            self._steps += phase == "data"
            self._mark(phase, own=phase in OWN)
        if self._watch is not None:
            self._watch(phase)

    def wait(self, collective: Callable[[], T]) -> T:
        """Calls what waits for other ranks, and leaves its time out of this rank's own."""
        phase = self._marks[-1][0] if self._marks else ""
        if phase not in OWN or self._steps % self._every:
            return collective()
        self._own.setdefault(self._steps, 0.0)
        self._mark(phase, own=False)
        try:
            return collective()
        finally:
            self._mark(phase, own=True)

    def _mark(self, phase: str, own: bool) -> None:
        self._marks.append((phase, own * self._steps, self._clock.mark(), self._coreless()))

    def own(self) -> float:
        """Seconds that this rank spends on its share of a step, as of the last `take`: the mean of the latest
        steps but the fastest and the slowest tenth. 0 while it is not known, as on a single rank."""
        goes_on = {step for _, step, *_ in self._marks}
        steps = sorted(seconds for step, seconds in self._own.items() if step not in goes_on)
        tenth = len(steps) // 10
        return fmean(steps[tenth : len(steps) - tenth]) if steps else 0.0

    def take(self) -> dict[str, float]:
        """Returns the seconds spent in each phase since the last call, up to where the device is."""
        if not self._marks:
            return {}
        self._mark(self._marks[-1][0], own=bool(self._marks[-1][1]))
        last = max((n for n, (*_, at, _) in enumerate(self._marks) if self._clock.passed(at)), default=0)
        self._marks, marks = self._marks[last:], self._marks[: last + 1]
        spent: dict[str, float] = {}
        for (phase, step, begun, coreless), (*_, ended, later) in pairwise(marks):
            seconds = self._clock.seconds(begun, ended)
            spent[phase] = spent.get(phase, 0.0) + seconds
            if step in self._own:
                self._own[step] += seconds - (later - coreless)
        self._own = dict(list(self._own.items())[-STEPS // self._every :])
        return spent
