"""Runs that are disturbed while they train: their processes, their progress, and what they come to."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training.verify_resume import compare_runs


def mm_train(*words: object) -> list[object]:
    return ["-m", "mm_core.cli.main", *words]


def equal(one: Path, other: Path) -> None:
    results, remarks = compare_runs(one, other)
    assert results and all(result.ok for result in results) and not remarks, (results, remarks)


def same_losses(one: Path, other: Path, steps: int) -> None:
    """Each step had the same samples, and so each of an epoch once, whichever hosts computed them."""
    alone, changing = (
        {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row} for run in (one, other)
    )
    assert changing.keys() == alone.keys() == set(range(1, steps + 1))
    assert [changing[step] for step in alone] == pytest.approx(list(alone.values()), rel=1e-4)


def worlds_of(run: Path) -> list[str]:
    """How many ranks each start of the run had."""
    return re.findall(r"--- rank 0 of (\d)", (run / "logs/rank_0.log").read_text())


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
