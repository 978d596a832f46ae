"""Runs that are disturbed while they train: their processes, their progress, and what they come to."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training.verify_resume import compare_runs


def mm_train(*words: object) -> list[object]:
    return ["-m", "mm_core.cli.main", *words]


def equal(one: Path, other: Path) -> None:
    results, remarks = compare_runs(one, other)
    assert results and all(result.ok for result in results) and not remarks, (results, remarks)


def pids_of(run: Path) -> list[int]:
    """The newest process of each rank, from the heads of the logs."""
    found = []
    for log in sorted((run / "logs").glob("rank_*.log")):
        found += re.findall(r"--- rank \d+ of \d+, pid (\d+) on", log.read_text())[-1:]
    return [int(pid) for pid in found]


def step_of(run: Path) -> int:
    with suppress(OSError, ValueError):
        return max((int(row["step"]) for row in read_metrics(run)), default=0)
    return 0


def below(launcher: int, pids: list[int]) -> list[int]:
    """Those of the ranks that this launcher has started."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                found.append(pid)
    return found
