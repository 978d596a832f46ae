"""Which checkpoints of a run stay, and what dead runs have left."""

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
    """Complete checkpoints under `folder` by step."""
    return {step: path for step, path in _named(folder) if (path / files.CHECKSUMS).is_file()}


def incomplete_steps(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name that have lost the list of their checksums: no save leaves such."""
    torn = (path for _, path in _named(folder) if path.is_dir() and not (path / files.CHECKSUMS).is_file())
    return sorted(torn)


def _named(folder: Path) -> list[tuple[int, Path]]:
    """What is named as a checkpoint, whatever it is."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(step, path) for path in paths if (step := step_of(path)) is not None]


def quarantine(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is never counted again and still there to be looked at."""
    return path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))


@dataclass(frozen=True)
class Retention:
    """What stays: the newest `keep`, those of every `keep_every` steps, and the best by a metric.

    best: name of a metric that facts hold under "metrics". mode: which of its values is best.
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
        """Has BEST name the best one, the earlier of equal ones, up to the checkpoint `newest`; its step, or
        None where no checkpoint has a value."""
        steps = _up_to(newest)
        values = {step: value for step, path in steps.items() if (value := self._value(path)) is not None}
        if not values:
            return None
        sign = 1 if self.mode == "min" else -1
        best = min(values, key=lambda step: (sign * values[step], step))
        replace_text(newest.parent / "BEST", steps[best].name + "\n", durable=True)
        return best

    def remove(self, newest: Path, best: int | None) -> None:
        """Removes what does not stay, up to the checkpoint just written; `best` is the best one's step."""
        steps = _up_to(newest)
        stay = {*list(steps)[-self.keep :], best}
        stay |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        for step, path in steps.items():
            if step not in stay:
                # Renamed first: a deletion that is cut short must not leave a half checkpoint under its name.
                doomed = path.rename(path.with_name(stage_name(path.name)))
                shutil.rmtree(doomed)


def _up_to(newest: Path) -> dict[int, Path]:
    """Complete checkpoints up to that one, in the order of their steps."""
    steps, written = complete_steps(newest.parent), step_of(newest)
    return {step: steps[step] for step in sorted(steps) if written is not None and step <= written}
