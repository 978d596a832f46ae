"""Ranks that all others wait for, found by the time that each spends outside of collectives."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from mm_core.device import current_device
from mm_core.errors import plural
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.phase_clock import STEPS

SLOW = 1.2
"""A rank is slow whose own time is more than this multiple of the median of the others, twice in a row."""

RECOVERED = 1.1
"""It is slow no more below this one: a rank near the limit is noted once."""

FILE = "slow_ranks.jsonl"


class SlowRanks:
    """Notes each rank that becomes slow, with its host and device, also in the run's `slow_ranks.jsonl`.

    Args:
        ranks: of the run.
        run_dir: the run's folder.
        start: steps already taken.
        note: prints a message, on rank 0.
    """

    def __init__(self, ranks: Ranks, run_dir: Path, start: int, note: Callable[[str], None]) -> None:
        self._ranks, self._file, self._note = ranks, run_dir / FILE, note
        self._since = start
        self._before: dict[int, float] = {}
        self._noted: set[int] = set()

    def judge(self, step: int, own: Sequence[float]) -> None:
        """Compares the ranks once in `STEPS` steps. All ranks must call it, with the same numbers.

        Args:
            step: steps taken.
            own: seconds of each rank in a step outside of collectives; 0: not known.
        """
        if step - self._since < STEPS:
            return
        self._since = step
        times, before = slowness(own), self._before
        over = {rank: each for rank, each in times.items() if each > SLOW}
        self._noted &= {rank for rank, each in times.items() if each > RECOVERED}
        news = (over.keys() & before.keys()) - self._noted
        self._noted, self._before = self._noted | news, over
        if not news:
            return
        places = self._ranks.gather(f"{socket.gethostname()}, {current_device()}")
        for rank in sorted(news):
            text = (
                f"rank {rank} ({places[rank]}) is slow: {own[rank]:.3g} s a step outside of collectives,"
                f" {(over[rank] + before[rank]) / 2 - 1:.0%} more than the others over the last"
                f" {plural(2 * STEPS, 'step')}; all ranks wait for it"
            )
            self._note(f"step {step}: {text}")
            if self._ranks.rank == 0:
                with suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "rank": rank, "text": text}) + "\n")


def slowness(own: Sequence[float]) -> dict[int, float]:
    """Each rank's own time as a multiple of the median of the others; none where a time is not known."""
    if len(own) < 2 or min(own) <= 0:
        return {}
    return {rank: own[rank] / median([*own[:rank], *own[rank + 1 :]]) for rank in range(len(own))}
