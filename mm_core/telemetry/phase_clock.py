"""Measures the time that training steps spend in each phase, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from mm_core.device import DeviceClock


class PhaseClock:
    """Measures the seconds that training steps spend in each phase (`data`, `encode`, `optimizer` ...).

    On an accelerator it times the device's queue with events that are read later.

    Args:
        clock: marks points in time; by default the device's own clock.
        watch: called with the name of each phase (the watchdog).
    """

    def __init__(self, clock: DeviceClock | None = None, watch: Callable[[str], None] | None = None) -> None:
        self._clock = clock or DeviceClock()
        self._watch = watch
        self._marks: list[tuple[str, object]] = []

    def enter(self, phase: str) -> None:
        """Begins a phase of the training step and ends the phase before it."""
        if self._marks and self._marks[-1][0] == phase:
            pass  # the phase goes on; only the watchdog is notified
        else:
            self._marks.append((phase, self._clock.mark()))
        if self._watch is not None:
            self._watch(phase)

    def take(self) -> dict[str, float]:
        """Returns the seconds spent in each phase since the last call, up to where the device is."""
        if not self._marks:
            return {}
        running = self._marks[-1][0]
        marks = [*self._marks, (running, self._clock.mark())]
        last = max((n for n, (_, at) in enumerate(marks) if self._clock.passed(at)), default=0)
        self._marks, marks = marks[last:], marks[: last + 1]
        spent: dict[str, float] = {}
        for (phase, begun), (_, ended) in pairwise(marks):
            spent[phase] = spent.get(phase, 0.0) + self._clock.seconds(begun, ended)
        return spent
