"""What a run's folder says: figures, declared densities, manifest, sampled clips.

A run may still be training, or have crashed: lines that are torn are counted and passed over, files that
are missing leave their part of the page out, and files that cannot be read are remarked upon.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from mm_core.errors import MMError, did_you_mean

METRICS = "metrics.jsonl"
_STEP_FOLDER = re.compile(r"step_(\d{1,15})\Z")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST_STEP = 2**53  # what a page's numbers count exactly


@dataclass
class Series:
    """One metric: steps in rising order and its values, which may be not finite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Adds a point. Points at or behind it were of a run that has since gone back to an older step."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class Shot:
    """Clips sampled after `step` steps: (prompt, mp4 file) each, and the contact sheet if there is one."""

    step: int
    clips: tuple[tuple[str, Path], ...]
    sheet: Path | None


@dataclass(frozen=True)
class Density:
    """The scale that the loss is binned along: its name, n + 1 edges, n declared shares."""

    name: str
    edges: tuple[float, ...]
    declared: tuple[float, ...]


@dataclass
class Run:
    """One run as its folder describes it. remarks: what could not be read."""

    label: str
    folder: Path
    series: dict[str, Series]
    written: float
    density: Density | None = None
    manifest: Mapping[str, object] = field(default_factory=dict)
    config_text: str = ""
    shots: list[Shot] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Steps that the newest line was written after."""
        return max(series.steps[-1] for series in self.series.values())

    @property
    def planned_steps(self) -> int | None:
        """Steps of the whole run, where its manifest says so."""
        plan = self.manifest.get("plan")
        steps = plan.get("steps") if isinstance(plan, dict) else None
        return steps if isinstance(steps, int) else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, in the order given, each once. MMError for what is no run, or has logged nothing yet."""
    unique = {folder.resolve(): folder for folder in folders}
    named = zip(unique.values(), labels(list(unique)), strict=True)
    return [read_run(folder, label) for folder, label in named]


def labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart: a run's name, as a rule."""
    found = []
    for folder in folders:
        others = [other.parts for other in folders if other != folder]
        size = 1
        while any(other[-size:] == folder.parts[-size:] for other in others):
            size += 1
        found.append("/".join(folder.parts[-size:]))
    return found


def read_run(folder: Path, label: str) -> Run:
    """One run. MMError when it is none, or has logged nothing yet."""
    _check(folder)
    path = folder / METRICS
    try:
        written = path.stat().st_mtime
        series, torn = read_series(path)
    except OSError as error:
        raise MMError(f"the metrics cannot be read: {error.strerror}", where=str(path)) from None
    if not series:
        raise MMError(
            "this run has logged nothing yet", where=str(path), hint="wait for its first step (log.every)"
        )
    run = Run(label, folder, series, written)
    if torn:
        run.remarks.append(f"{torn} line{'s' * (torn != 1)} of {METRICS} could not be read and were left out")
    run.manifest = _document(folder / "manifest.json", run.remarks)
    run.density = _density(_document(folder / "telemetry.json", run.remarks))
    config = folder / "config.yaml"
    if config.exists():
        try:
            run.config_text = config.read_text(encoding="utf-8", errors="replace")
        except OSError:
            run.remarks.append(f"{config.name} cannot be read and was left out")
    run.shots = read_shots(folder / "samples")
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
            hint=did_you_mean(folder.name, near) or "mm-train prints the run's folder",
        )
    if not folder.is_dir():
        raise MMError("this is a file, not a run's folder", where=str(folder), accepted=accepted)
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if inside:
        names = " ".join(str(folder / name) for name in inside[:4])
        raise MMError(
            f"this folder holds {len(inside)} run{'s' * (len(inside) != 1)} and is none",
            where=str(folder),
            accepted=accepted,
            hint=f"name those to show: mm report {names}",
        )
    begun = (folder / "config.yaml").is_file()
    what = "this run has logged nothing yet" if begun else "this folder is no run"
    raise MMError(f"{what}: it holds no {METRICS}", where=str(folder), accepted=accepted)


def read_series(path: Path) -> tuple[dict[str, Series], int]:
    """Every metric of the file, and the number of lines that are none (torn by a crash, say)."""
    series: dict[str, Series] = {}
    torn = 0
    with path.open("rb") as lines:
        for line in lines:
            row = _row(line)
            if row is None:
                torn += bool(line.strip())
                continue
            step, figures = row
            for name, value in figures.items():
                if (number := _number(value)) is not None:
                    series.setdefault(name, Series()).add(step, number)
    return series, torn


def _row(line: bytes) -> tuple[int, dict[str, object]] | None:
    """Its step, and what else stands in it."""
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
    """A JSON object; {} where there is none, with a remark where it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    remarks.append(f"{path.name} cannot be read and was left out")
    return {}


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
    """Clips sampled while training, by rising step. Only files in their own folder count."""
    if not folder.is_dir():
        return []
    shots = []
    for path in folder.iterdir():
        match = _STEP_FOLDER.match(path.name)
        if match is None or not path.is_dir():
            continue
        rows = _prompts(path / "prompts.json")
        if not rows:  # sampling was cut short: the names of the files say something of the prompts
            rows = [(clip.stem.partition("-")[2].replace("-", " "), clip.name) for clip in path.glob("*.mp4")]
        clips = tuple((prompt, path / name) for prompt, name in sorted(rows, key=lambda row: row[1]))
        sheet = path / "contact_sheet.png"
        present = tuple((prompt, clip) for prompt, clip in clips if _own(clip))
        if present or _own(sheet):
            shots.append(Shot(int(match[1]), present, sheet if _own(sheet) else None))
    return sorted(shots, key=lambda shot: shot.step)


def _own(path: Path) -> bool:
    """A file, and no link: a page that is handed on must not carry what a link leads to."""
    return path.is_file() and not path.is_symlink()


def _prompts(path: Path) -> list[tuple[str, str]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
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
        and row["path"].endswith(".mp4")
    ]
