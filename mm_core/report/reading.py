"""Reads a run's folder for the report: metrics, declared densities, manifest, sampled clips.

A run may still be training, or may have crashed: truncated lines are counted and skipped, a missing file
leaves out its part of the page, and a file that cannot be read gets a remark.
"""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from mm_core.errors import MMError, did_you_mean, plural
from mm_core.files import open_plain, read_plain, read_rows

METRICS = "metrics.jsonl"
_STEP_FOLDER = re.compile(r"step_(\d{1,15})\Z")
_CLIP = re.compile(r"\d+(-.*)?\.(mp4|png)\Z")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST_STEP = 2**53  # JavaScript's numbers are exact up to here


@dataclass
class Series:
    """One metric of a run: steps in increasing order and their values, which may be NaN or infinite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Adds a point to a metric's series; later points are removed, as the run resumed before them."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class Shot:
    """The clips that a run sampled after `step` steps: (prompt, mp4 file) each, and their contact sheet."""

    step: int
    clips: tuple[tuple[str, Path], ...]
    sheet: Path | None


@dataclass(frozen=True)
class Density:
    """The scale of a run's loss bins: its name, n + 1 edges, n declared shares."""

    name: str
    edges: tuple[float, ...]
    declared: tuple[float, ...]


@dataclass
class Run:
    """One run of a report, as read from its folder."""

    label: str
    folder: Path
    series: dict[str, Series]
    written: float  # time of the last change of the metrics
    density: Density | None = None
    manifest: Mapping[str, object] = field(default_factory=dict)
    config_text: str = ""
    shots: list[Shot] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # what could not be read, and ranks that were slow

    @property
    def last_step(self) -> int:
        """The last step that the run has logged."""
        return max(series.steps[-1] for series in self.series.values())

    @property
    def planned_steps(self) -> int | None:
        """The total number of steps of the run, if its manifest contains it."""
        plan = self.manifest.get("plan")
        steps = plan.get("steps") if isinstance(plan, dict) else None
        return steps if isinstance(steps, int) else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads runs for the report, in the given order, each once.

    Raises:
        MMError: a folder is not a run, or the run has logged nothing yet.
    """
    unique = {folder.resolve(): folder for folder in folders}
    named = zip(unique.values(), labels(list(unique)), strict=True)
    return [read_run(folder, label) for folder, label in named]


def labels(folders: Sequence[Path]) -> list[str]:
    """Labels for runs in a report: the shortest distinct ends of their paths, usually their names."""
    found = []
    for folder in folders:
        others = [other.parts for other in folders if other != folder]
        size = 1
        while any(other[-size:] == folder.parts[-size:] for other in others):
            size += 1
        found.append("/".join(folder.parts[-size:]))
    return found


def read_run(folder: Path, label: str) -> Run:
    """Reads one run's folder for the report.

    Args:
        folder: the run's folder.
        label: name of the run in the report.

    Raises:
        MMError: the folder is not a run, or the run has logged nothing yet.
    """
    _check(folder)
    path = folder / METRICS
    try:
        written = path.stat().st_mtime
        series, unreadable = read_series(path)
    except OSError as error:
        what = f"the metrics cannot be read: {error.strerror}"
        raise MMError(what, where=str(path), hint="check the file's permissions and the disk") from None
    if not series:
        raise MMError(
            "this run has logged nothing yet", where=str(path), hint="wait for its first step (log.every)"
        )
    run = Run(label, folder, series, written)
    if unreadable:
        run.remarks.append(f"{plural(unreadable, 'line')} of {METRICS} skipped: not readable")
    run.manifest = _document(folder / "manifest.json", run.remarks)
    run.density = _density(_document(folder / "telemetry.json", run.remarks))
    config = folder / "config.yaml"
    if config.exists():
        try:
            run.config_text = read_plain(config).decode(errors="replace")
        except OSError:
            run.remarks.append(f"{config.name} skipped: not readable")
    run.remarks += slow_ranks(folder / "slow_ranks.jsonl")
    run.shots = read_shots(folder / "samples")
    for row in read_rows(folder / "restarts.jsonl"):
        when = time.strftime("%d %b %H:%M", time.localtime(row.get("time", 0)))
        what = f"from step {row.get('step') or 0}: {row.get('what')}"
        run.remarks.append(f"restart {row.get('restart')} ({when}) {what}")
    return run


def _check(folder: Path) -> None:
    if (folder / METRICS).is_file():
        return
    accepted = "a run's folder, such as runs/NAME"
    if not folder.exists():
        near = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise MMError(
            "there is no such run",
            where=str(folder),
            accepted=accepted,
            hint=did_you_mean(folder.name, near) or "mm-train prints the folder of a run",
        )
    if not folder.is_dir():
        raise MMError("this is a file, not a run's folder", where=str(folder), accepted=accepted)
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if inside:
        names = " ".join(str(folder / name) for name in inside[:4])
        raise MMError(
            f"this folder is not a run but contains {plural(len(inside), 'run')}",
            where=str(folder),
            accepted=accepted,
            hint=f"pass the runs to show: mm report {names}",
        )
    started = (folder / "config.yaml").is_file()
    what = "this run has logged nothing yet" if started else "this folder is not a run"
    raise MMError(f"{what}: it contains no {METRICS}", where=str(folder), accepted=accepted)


def read_series(path: Path) -> tuple[dict[str, Series], int]:
    """Reads every metric of a run's metrics.jsonl; also returns the number of unreadable lines.

    A crash can truncate a line.
    """
    series: dict[str, Series] = {}
    unreadable = 0
    with open_plain(path) as lines:
        for line in lines:
            row = _row(line)
            if row is None:
                unreadable += bool(line.strip())
                continue
            step, figures = row
            for name, value in figures.items():
                if (number := _number(value)) is not None:
                    series.setdefault(name, Series()).add(step, number)
    return series, unreadable


def _row(line: bytes) -> tuple[int, dict[str, object]] | None:
    """The step of a line, and its other values."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.pop("step", None) if isinstance(row, dict) else None
    return (step, row) if type(step) is int and 0 <= step < _LARGEST_STEP else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _document(path: Path, remarks: list[str]) -> dict[str, object]:
    """The JSON object in a file; {} if the file is missing, or, with a remark, if it cannot be read."""
    try:
        document = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    remarks.append(f"{path.name} skipped: not readable")
    return {}


def slow_ranks(path: Path) -> list[str]:
    """What a run has noted of ranks that the others waited for; lines that a crash has cut are left out."""
    try:
        rows = [json.loads(line) for line in read_plain(path).decode().splitlines() if line.endswith("}")]
        return [f"step {int(row['step']):,}: {row['text']}" for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return [f"{path.name} skipped: not readable"]


def _density(telemetry: Mapping[str, object]) -> Density | None:
    bins = telemetry.get("bins")
    if not isinstance(bins, dict):
        return None
    name, edges, declared = bins.get("name"), bins.get("edges"), bins.get("declared")
    if not isinstance(name, str) or not _numbers(edges) or not _numbers(declared):
        return None
    return Density(name, tuple(edges), tuple(declared)) if len(edges) == len(declared) + 1 else None


def _numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    )


def read_shots(folder: Path) -> list[Shot]:
    """Finds the clips that a run sampled during training, in the order of steps; links are skipped."""
    if not folder.is_dir():
        return []
    shots = []
    for path in folder.iterdir():
        match = _STEP_FOLDER.match(path.name)
        if match is None or not path.is_dir():
            continue
        rows = _prompts(path / "prompts.json")
        if not rows:  # sampling was interrupted: take the prompts from the file names
            own = [clip for clip in path.iterdir() if _CLIP.match(clip.name)]
            rows = [(clip.stem.partition("-")[2].replace("-", " "), clip.name) for clip in own]
        clips = tuple((prompt, path / name) for prompt, name in sorted(rows, key=lambda row: row[1]))
        sheet = path / "contact_sheet.png"
        present = tuple((prompt, clip) for prompt, clip in clips if _own(clip))
        if present or _own(sheet):
            shots.append(Shot(int(match[1]), present, sheet if _own(sheet) else None))
    return sorted(shots, key=lambda shot: shot.step)


def _own(path: Path) -> bool:
    """Whether a path is a file and not a link: a shared page must not contain the target of a link."""
    return path.is_file() and not path.is_symlink()


def _prompts(path: Path) -> list[tuple[str, str]]:
    try:
        rows = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(rows, list):
        return []
    return [
        (row["cap"], row["path"])
        for row in rows
        if isinstance(row, dict)
        and isinstance(row.get("cap"), str)
        and isinstance(row.get("path"), str)
        and Path(row["path"]).name == row["path"]
        and row["path"].endswith((".mp4", ".png"))
    ]
