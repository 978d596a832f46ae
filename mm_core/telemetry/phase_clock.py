"""Measures the time that training steps spend in each phase, without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
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
        self._marks: list[tuple[str, bool, object, float]] = []
        on_cpu = device_type() == "cpu"
        shared = clock is None and on_cpu and environment_world().world_size > 1
        self._coreless: Callable[[], float] = CoreWaits() if shared else lambda: 0.0
        self._every = 1 if on_cpu else 5  # a collective costs two events of the device
        self._steps, self._at = 0, ""
        self._step, self._waited = 0.0, False
        self._own: deque[float] = deque(maxlen=STEPS // self._every)

    def enter(self, phase: str) -> None:
        """Begins a phase of the training step and ends the phase before it."""
        if self._marks and self._marks[-1][0] == phase:
            pass  # the phase goes on; only the watchdog is notified
        else:
            self._steps += phase == "data"
            self._mark(phase)
        if self._watch is not None:
            self._watch(phase)

    def wait(self, collective: Callable[[], T]) -> T:
        """Calls what waits for other ranks, and leaves its time out of this rank's own."""
        phase = self._marks[-1][0] if self._marks else ""
        if phase not in OWN or self._steps % self._every:
            return collective()
        self._mark(phase, waits=True)
        try:
            return collective()
        finally:
            self._mark(phase)

    def _mark(self, phase: str, waits: bool = False) -> None:
        self._marks.append((phase, waits, self._clock.mark(), self._coreless()))

    def own(self) -> float:
        """Seconds that this rank spends on its share of a step, as of the last `take`: the mean of the latest
        steps but the fastest and the slowest tenth. 0 while it is not known, as on a single rank."""
        steps, tenth = sorted(self._own), len(self._own) // 10
        steps = steps[tenth : len(steps) - tenth]
        return sum(steps) / len(steps) if steps else 0.0

    def take(self) -> dict[str, float]:
        """Returns the seconds spent in each phase since the last call, up to where the device is."""
        if not self._marks:
            return {}
        self._mark(self._marks[-1][0])
        last = max((n for n, (*_, at, _) in enumerate(self._marks) if self._clock.passed(at)), default=0)
        self._marks, marks = self._marks[last:], self._marks[: last + 1]
        spent: dict[str, float] = {}
        for (phase, waits, begun, coreless), (*_, ended, later) in pairwise(marks):
            seconds = self._clock.seconds(begun, ended)
            spent[phase] = spent.get(phase, 0.0) + seconds
            self._add(phase, waits, seconds - (later - coreless))
        return spent

    def _add(self, phase: str, waits: bool, seconds: float) -> None:
        if phase == "data" and self._at != "data":
            if self._waited:  # else the step was not measured
                self._own.append(self._step)
            self._step, self._waited = 0.0, False
        self._at = phase
        self._waited |= waits
        self._step += seconds * (phase in OWN and not waits)
