"""Annotation files: a JSON list, or JSONL, of rows {path, cap, ...}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mm_core.data.rows.json_rows import RowFile, kind_of
from mm_core.data.rows.paths import refused
from mm_core.data.rows.tables import columns_for
from mm_core.errors import DataError, plural

ACCEPTED = (
    'a JSON list or JSONL of rows {"path": "clips/a.mp4", "cap": "a caption" (or a list of captions)}, '
    'optionally with "num_frames": 49, "fps": 24, "resolution": {"height": 480, "width": 832}; '
    "other keys are ignored"
)
_SIDES = ("height", "width")
_SHOWN = 10  # errors listed in one message; the rest are counted


@dataclass(frozen=True)
class Annotation:
    """One row of an annotation file, from 1. The number of frames is the file's own claim about the video."""

    row: int
    path: str
    captions: tuple[str, ...]
    num_frames: int | None = None


def read_annotations(file: Path, most: int | None = None) -> list[Annotation]:
    """Reads and checks every row of an annotation file, or the first `most`.

    A path that is absolute or leaves its folder by `..` is an error here. A path that leaves it through a
    symbolic link is found by `inside` when the sample is read, because resolving a million paths at start-up
    takes minutes on a network file system.

    Raises:
        DataError: reports all errors of the rows at once.
    """
    rows: list[Annotation] = []
    faults: dict[str, list[str]] = {}
    values = RowFile(file, "annotation file", ACCEPTED, _hint).json_values()
    for place, value in islice(values, most):
        if isinstance(value, DataError):
            raise value
        fault = _fault(value)
        if fault:
            faults.setdefault(fault, []).append(place)
        else:
            rows.append(_annotation(len(rows) + 1, value))
    if faults:
        raise DataError(describe_faults(faults), where=str(file), accepted=ACCEPTED)
    if not rows:
        raise DataError("the annotation file lists no samples", where=str(file), accepted=ACCEPTED)
    return rows


def inside(folder: Path, relative: str) -> Path:
    """The path of a sample's file in its folder.

    Args:
        folder: the folder of the samples.
        relative: the path in a row.

    Raises:
        DataError: symbolic links lead out of the folder, or the system refuses the path.
    """
    path = folder / relative
    with refused("path", path):
        relative.encode()  # a name that is not text could not be reported
        within = path.resolve().is_relative_to(folder.resolve())
    if not within:
        raise DataError(
            "the path leaves its folder through a symbolic link",
            where=str(path),
            accepted=f"files inside {folder}",
            hint="copy the files into the folder, or name the real folder of the files",
        )
    return path


def _hint(line: str) -> str | None:
    named = 'write a resolution as an object: {"height": 480, "width": 832}'
    return named if "resolution" in line else None


def _fault(row: object) -> str | None:
    """The error of a row, without its number, so that equal errors can be grouped; None if it has none."""
    if not isinstance(row, dict):
        return f"{kind_of(row)} instead of a row"
    missing = [key for key in ("path", "cap") if key not in row]
    if missing:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        fits = f"; the dataset media_text reads it with {fit}" if (fit := columns_for(row)) else ""
        return f"no {' and no '.join(repr(key) for key in missing)} (found: {found[:200]}){fits}"
    path, captions = row["path"], row["cap"]
    if not isinstance(path, str) or not path:
        return f"path is {kind_of(path)}, not a file name"
    if how := escapes(path):
        return f"path {path!r} {how}"
    texts = captions if isinstance(captions, list) else [captions]
    if not texts or not all(isinstance(text, str) for text in texts):
        return f"cap is {kind_of(captions)}, not a caption or a list of captions"
    return _fact_fault(row)


def _fact_fault(row: Mapping[str, object]) -> str | None:
    facts = [("num_frames", row.get("num_frames"), True), ("fps", row.get("fps"), False)]
    resolution = row.get("resolution")
    if isinstance(resolution, list) and len(resolution) == 2:
        facts += [("resolution", side, True) for side in resolution]
    elif resolution is not None:
        if not isinstance(resolution, dict) or not set(_SIDES) <= set(resolution):
            return f'resolution is {kind_of(resolution)}, not {{"height": .., "width": ..}}'
        facts += [(f"resolution.{side}", resolution[side], True) for side in _SIDES]
    for name, value, whole in facts:
        if value is None:
            continue
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
        if not 0 < number < float("inf") or (whole and number != int(number)):
            return f"{name} is {value!r}, not a positive {'whole ' if whole else ''}number"
    return None


MAY_ESCAPE = r"(?s)^[/\\]|^.:|(^|/)\.\.(/|$)"
"""Matches each path that `escapes`, and some others: for columns of paths."""


def escapes(path: str) -> str:
    """How a path in a row leaves its folder, as far as its text shows; empty: it does not."""
    if path[:1] != "/" and ".." not in path and ":" not in path and "\\" not in path:
        return ""  # parsing a million paths takes seconds
    if PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute():
        return "is absolute: rows have paths relative to the folder of their source"
    return "leads outside the folder" if ".." in PurePosixPath(path).parts else ""


def _annotation(row: int, value: Mapping[str, Any]) -> Annotation:
    captions = value["cap"] if isinstance(value["cap"], list) else [value["cap"]]
    frames = value.get("num_frames")
    return Annotation(row, value["path"], tuple(captions), None if frames is None else int(frames))


def describe_faults(faults: Mapping[str, Sequence[str]]) -> str:
    """The errors of a file's rows, each with the places where it occurs."""
    count = sum(len(places) for places in faults.values())
    lines = [f"{plural(count, 'row')} cannot be used"]
    for fault, places in list(faults.items())[:_SHOWN]:
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        lines.append(f"  {', '.join(places[:_SHOWN])}{more}: {fault}")
    if len(faults) > _SHOWN:
        lines.append(f"  and {len(faults) - _SHOWN} further kinds of error")
    return "\n".join(lines)
