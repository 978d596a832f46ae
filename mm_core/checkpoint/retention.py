"""Checkpoint retention: which checkpoints of a run stay, which are deleted, which is the best."""

from __future__ import annotations

import math
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.facts import read_later, step_of
from mm_core.errors import CheckpointError
from mm_core.files import replace_text, stage_name


def complete_steps(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a run's checkpoint folder, by step."""
    return {step: path for step, path in _named(folder) if (path / files.CHECKSUMS).is_file()}


def incomplete_steps(folder: Path) -> list[Path]:
    """Checkpoint folders that have lost their list of checksums, which no save leaves behind."""
    found = (path for _, path in _named(folder) if path.is_dir() and not (path / files.CHECKSUMS).is_file())
    return sorted(found)


def _named(folder: Path) -> list[tuple[int, Path]]:
    """Everything with the name of a checkpoint, whatever it contains."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(step, path) for path in paths if (step := step_of(path)) is not None]


def quarantine(path: Path) -> Path:
    """Renames a damaged checkpoint so that it is never used again but can still be inspected."""
    return path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay: the newest ones, those of every so many steps, and the best one.

    Attributes:
        keep: how many of the newest checkpoints stay.
        keep_every: checkpoints of multiples of this step stay; None for none.
        best: name of a metric in the facts' "metrics", whose best checkpoint stays; None for none.
        mode: whether the smallest or the largest value of `best` is best.
    """

    keep: int
    keep_every: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def _value(self, path: Path) -> float | None:
        if self.best is None:
            return None
        with suppress(CheckpointError, OSError):
            facts = {**files.read_json(path / files.FACTS), **read_later(path)}
            metrics = facts.get("metrics")
            value = metrics.get(self.best) if isinstance(metrics, dict) else None
            if isinstance(value, (int, float)) and math.isfinite(value):
                return float(value)
        return None

    def name_best(self, newest: Path) -> int | None:
        """Writes the name of the run's best checkpoint to the file BEST and returns its step.

        Checkpoints up to `newest` count; of equal ones the earlier is the best. None if no checkpoint has a
        value of the metric.
        """
        steps = _up_to(newest)
        values = {step: value for step, path in steps.items() if (value := self._value(path)) is not None}
        if not values:
            return None
        sign = 1 if self.mode == "min" else -1
        best = min(values, key=lambda step: (sign * values[step], step))
        replace_text(newest.parent / "BEST", steps[best].name + "\n", durable=True)
        return best

    def remove(self, newest: Path, best: int | None) -> None:
        """Deletes the checkpoints that are not kept.

        Args:
            newest: the checkpoint just written; later ones are not touched.
            best: the step of the best checkpoint, which stays.
        """
        steps = _up_to(newest)
        stay = {*list(steps)[-self.keep :], best}
        stay |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        for step, path in steps.items():
            if step not in stay:
                # Renamed first: an interrupted deletion must not leave half a checkpoint under its name.
                doomed = path.rename(path.with_name(stage_name(path.name)))
                shutil.rmtree(doomed)


def _up_to(newest: Path) -> dict[int, Path]:
    """Complete checkpoints up to `newest`, in the order of their steps."""
    steps, written = complete_steps(newest.parent), step_of(newest)
    return {step: steps[step] for step in sorted(steps) if written is not None and step <= written}
