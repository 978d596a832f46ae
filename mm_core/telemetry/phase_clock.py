"""How the time of steps divides into phases, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from mm_core.device import DeviceClock


class PhaseClock:
    """Seconds spent in each phase. On an accelerator its queue is timed, by events that are read later.

    Args:
        clock: marks moments; the device's own by default.
        watch: told of every phase as well (the watchdog).
    """

    def __init__(self, clock: DeviceClock | None = None, watch: Callable[[str], None] | None = None) -> None:
        self._clock = clock or DeviceClock()
        self._watch = watch
        self._marks: list[tuple[str, object]] = []

    def enter(self, phase: str) -> None:
        """A phase begins; the one before ends."""
        if self._marks and self._marks[-1][0] == phase:
            pass  # a sign of life within a long phase
        else:
            self._marks.append((phase, self._clock.mark()))
        if self._watch is not None:
            self._watch(phase)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call; the phase that runs goes on. Waits for the device."""
        if not self._marks:
            return {}
        running = self._marks[-1][0]
        marks = [*self._marks, (running, self._clock.mark())]
        self._marks = marks[-1:]
        spent: dict[str, float] = {}
        for (phase, begun), (_, ended) in pairwise(marks):
            spent[phase] = spent.get(phase, 0.0) + self._clock.seconds(begun, ended)
        return spent
