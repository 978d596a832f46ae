"""Selects the sampled clips that a report page embeds: the newest and evenly spaced ones come first."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from mm_core.report.reading import Run, Shot


def embed(run: Run, budget: int) -> tuple[list[dict[str, object]], int]:
    """Embeds a run's sampled clips in the report page; returns the clips of each step, and their bytes.

    A step's clips are embedded together. If they are too large, its contact sheet is embedded; if that is too
    large, the page lists the file names. Files that cannot be read are listed too, with a remark.

    Args:
        run: the run.
        budget: most bytes, as base64 text, for this run.
    """
    carried: dict[int, dict[str, str]] = {}
    left = budget
    order = spread(len(run.shots))
    for only_sheets in (False, True):
        for place in order:
            shot = run.shots[place]
            sheets = [shot.sheet] if shot.sheet is not None else []
            files = sheets if only_sheets else [path for _, path in shot.clips]
            if place in carried or not files:
                continue
            try:
                size = sum(encoded_size(path) for path in files)
                if size <= left:
                    carried[place] = {path.name: _data_uri(path) for path in files}
                    left -= size
            except OSError as error:
                run.remarks.append(f"samples of step {shot.step}: {error.strerror}")
    return [_shot(shot, carried.get(place, {})) for place, shot in enumerate(run.shots)], budget - left


def spread(count: int) -> list[int]:
    """The order in which a report page embeds clips 0 .. count - 1: last, first, middle, quarters, ..."""
    order = [count - 1, 0] if count > 1 else list(range(count))
    gaps = [(0, count - 1)]
    while gaps:
        begin, end = gaps.pop(0)
        middle = (begin + end) // 2
        if middle not in (begin, end):
            order.append(middle)
            gaps += [(begin, middle), (middle, end)]
    return order


def encoded_size(path: Path) -> int:
    """The bytes that a file takes in a report page as base64 text."""
    return -(-path.stat().st_size // 3) * 4


def _data_uri(path: Path) -> str:
    kind = "video/mp4" if path.suffix == ".mp4" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _shot(shot: Shot, carried: dict[str, str]) -> dict[str, object]:
    clips = [
        {"prompt": prompt, "file": f"{path.parent.name}/{path.name}", "src": carried.get(path.name)}
        for prompt, path in shot.clips
    ]
    sheet = carried.get(shot.sheet.name) if shot.sheet is not None else None
    return {"step": shot.step, "clips": clips, "sheet": sheet}


def prompts(runs: Sequence[Run]) -> list[str]:
    """Every prompt in a report of several runs, in the order of the newest clips."""
    return list(dict.fromkeys(p for run in runs for shot in reversed(run.shots) for p, _ in shot.clips))
