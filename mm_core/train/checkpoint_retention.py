"""Which checkpoints of a run stay, and what dead runs have left."""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mm_core.data.aftermath import alive
from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_io as files
from mm_core.train.checkpoint_facts import read_later, step_of

_STAGE = re.compile(r".*\.tmp-[0-9a-f]+(?:-(\d+)@(.+))?\Z")


def complete_steps(folder: Path) -> dict[int, Path]:
    """Complete checkpoints under `folder` by step."""
    if not folder.is_dir():
        return {}
    named = ((step_of(path), path) for path in folder.iterdir())
    return {step: path for step, path in named if step is not None and (path / files.CHECKSUMS).is_file()}


def torn_steps(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name that have lost the list of their checksums: no save leaves such."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if step_of(path) is not None and path.is_dir() and not (path / files.CHECKSUMS).is_file()
    )


def stage_name(final: str) -> str:
    """A fresh name for a checkpoint that is being written: it says who writes it."""
    return f"{final}.tmp-{secrets.token_hex(4)}-{os.getpid()}@{socket.gethostname()}"


def remove_stale_stages(folder: Path, pattern: str = "*.tmp-*", patience: float | None = None) -> None:
    """Removes what dead runs left unfinished; what a live process of this host writes is left alone.

    patience: seconds since something was last written to it, after which that of another host is taken for
        dead; None where it is known to be: the caller holds the lock that a writer would hold.
    """
    for leftover in folder.glob(pattern):
        owner = _STAGE.match(leftover.name)
        here = owner is not None and owner[2] == socket.gethostname()
        if owner and here and int(owner[1]) != os.getpid() and alive(int(owner[1])):
            continue
        if not here and patience is not None and time.time() - _written(leftover) < patience:
            continue
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _written(path: Path) -> float:
    """When anything in a folder was last written."""
    times = [0.0]
    for place in (path, *path.rglob("*")):
        with suppress(OSError):
            times.append(place.lstat().st_mtime)
    return max(times)


def put_aside(path: Path) -> Path:
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

    def best_of(self, steps: Mapping[int, Path]) -> int | None:
        """The step with the best value; the earlier of equal ones. None where nobody has one."""
        values = {step: value for step, path in steps.items() if (value := self._value(path)) is not None}
        sign = 1 if self.mode == "min" else -1
        return min(values, key=lambda step: (sign * values[step], step)) if values else None

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
        """Has BEST name the best one, up to the checkpoint `newest`; its step."""
        steps = _up_to(newest)
        best = self.best_of(steps)
        if best is not None:
            files.move_text(newest.parent / "BEST", steps[best].name + "\n")
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
