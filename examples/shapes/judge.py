"""Judges from pixels whether clips of moving shapes follow their captions.

    python examples/shapes/judge.py FOLDER [--prompts prompts.json] [--require 0.95]

FOLDER holds mp4 files, taken in the order of their names, or is an .npz file with `pixels`
[N,3,F,Y,X] in [-1,1] and `prompts`. Prompts are a JSON list in the same order, or rows {path, cap}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from mm_core.data import moving_shapes

SATURATED = 0.35  # max - min channel, of 1, above which a pixel counts as coloured
AREA = (0.01, 0.35)  # share of a frame that a shape may cover
AGREEMENT = 0.7  # share of coloured pixels, weighted by saturation, that must have one colour
TRAVEL = 0.15  # share of the frame's side that a shape must move, or in a photo be off the middle
STRAIGHT = 2.0  # times that this must exceed the same across the axis
STEADY = 0.7  # share of the motion along its axis that a straight line over time must explain
ROUND = 0.89  # covered share of the bounding box: a square fills 1, a circle pi / 4


@dataclass(frozen=True)
class Judgement:
    """Colour, shape and direction of a clip of moving shapes; None where unclear. A photo's direction is the
    side of the frame where its shape is."""

    colour: str | None
    shape: str | None
    direction: str | None


@dataclass(frozen=True)
class Score:
    """Shares of clips that follow their own prompts, and shares for prompts of other clips (control)."""

    clips: int
    colour: float
    shape: float
    direction: float
    control_colour: float
    control_shape: float
    control_direction: float

    def table(self) -> str:
        """The scores of the judged clips as a text table."""
        lines = [f"{self.clips} clips     followed   with shuffled captions"]
        for name in ("colour", "direction", "shape"):
            lines.append(f"  {name:<10}{getattr(self, name):8.1%}   {getattr(self, 'control_' + name):8.1%}")
        return "\n".join(lines)


def judge_clip(pixels: np.ndarray) -> Judgement:
    """Judges colour, shape and direction of a clip from its pixels.

    Args:
        pixels: [3,F,Y,X] in [-1,1], array or CPU tensor.
    """
    clip = (np.clip(np.asarray(pixels, dtype=np.float64), -1, 1) + 1) / 2
    saturation = clip.max(0) - clip.min(0)  # [F,Y,X]
    coloured = saturation > SATURATED
    area = coloured.mean(axis=(1, 2))
    if not ((area >= AREA[0]) & (area <= AREA[1])).all():
        return Judgement(None, None, None)
    colour = _colour(clip, saturation * coloured)
    if colour is None:
        return Judgement(None, None, None)
    cover = _cover(clip, colour)
    return Judgement(colour, _shape(cover), _direction(cover))


def judge_prompt(prompt: str) -> Judgement:
    """Colour, shape and direction that a caption asks for, by its words."""
    words = prompt.lower().replace(".", " ").replace(",", " ").split()
    return Judgement(
        *(
            next((w for w in words if w in known), None)
            for known in (moving_shapes.COLOURS, moving_shapes.SHAPES, moving_shapes.DIRECTIONS)
        )
    )


def score(clips: Sequence[np.ndarray], prompts: Sequence[str]) -> Score:
    """Shares of clips that follow their prompts. The control is the mean over all pairings of a clip with the
    prompt of another one: the score of a model that ignores its captions.

    Raises:
        ValueError: the numbers of clips and prompts differ, or are 0.
    """
    if len(clips) != len(prompts) or not clips:
        raise ValueError(
            f"{len(clips)} clips and {len(prompts)} prompts given: needs one prompt per clip, at least one"
        )
    shown, asked = [judge_clip(clip) for clip in clips], [judge_prompt(prompt) for prompt in prompts]
    count = len(shown)
    values: dict[str, float] = {}
    for part in ("colour", "shape", "direction"):
        same = np.array([[_same(s, a, part) for a in asked] for s in shown], dtype=np.float64)
        own = float(np.trace(same))
        values[part] = own / count
        values["control_" + part] = (same.sum() - own) / max(1, count * (count - 1))
    return Score(clips=count, **values)


def _same(shown: Judgement, asked: Judgement, part: str) -> bool:
    wanted = getattr(asked, part)
    return wanted is not None and getattr(shown, part) == wanted


def _colour(clip: np.ndarray, weight: np.ndarray) -> str | None:
    """The colour of the palette closest to most coloured pixels, by hue instead of brightness."""
    palette = np.array(list(moving_shapes.COLOURS.values()), dtype=np.float64)  # [P,3]
    chroma = palette - palette.mean(1, keepdims=True)
    chroma /= np.linalg.norm(chroma, axis=1, keepdims=True)
    hues = clip - clip.mean(0)
    nearest = np.tensordot(chroma, hues, axes=1).argmax(0)  # [F,Y,X]
    votes = np.array([(weight * (nearest == place)).sum() for place in range(len(palette))])
    best = int(votes.argmax())
    return list(moving_shapes.COLOURS)[best] if votes[best] >= AGREEMENT * votes.sum() else None


def _cover(clip: np.ndarray, colour: str) -> np.ndarray:
    """Position [F,Y,X] of each pixel between the background (0) and the colour (1)."""
    background = np.array(moving_shapes.BACKGROUND) / 255
    way = np.array(moving_shapes.COLOURS[colour]) / 255 - background
    along = np.tensordot(way, clip - background[:, None, None, None], axes=1) / (way @ way)
    return np.clip((along - 0.1) / 0.8, 0, 1)  # ignores noise of codec and sampling on the background


def _direction(cover: np.ndarray) -> str | None:
    """Direction of the centre's motion along a straight line over the frames, or of a photo's shape from the
    middle; None if unclear."""
    frames, height, width = cover.shape
    mass = cover.sum(axis=(1, 2))
    if (mass <= 0).any():
        return None
    x = (cover.sum(1) @ np.arange(width)) / mass / width
    y = (cover.sum(2) @ np.arange(height)) / mass / height
    if frames == 1:
        return _axis_of(np.array([x[0], y[0]]) + 0.5 / np.array([width, height]) - 0.5)[1]
    when = np.arange(frames)
    lines = [np.polyfit(when, path, 1) for path in (x, y)]
    moved = np.array([line[0] for line in lines]) * (frames - 1)
    axis, name = _axis_of(moved)
    path = (x, y)[axis]
    if (
        np.square(path - np.polyval(lines[axis], when)).sum()
        > (1 - STEADY) * np.square(path - path.mean()).sum()
    ):
        return None
    return name


def _axis_of(way: np.ndarray) -> tuple[int, str | None]:
    """The axis of a way (x, y), in shares of the frame, and its direction; None if too short or slanted."""
    axis = int(abs(way).argmax())
    if abs(way[axis]) < TRAVEL or abs(way[axis]) < STRAIGHT * abs(way[1 - axis]):
        return axis, None
    step = [0, 0]
    step[axis] = 1 if way[axis] > 0 else -1
    return axis, next(name for name, vector in moving_shapes.DIRECTIONS.items() if vector == tuple(step))


def _shape(cover: np.ndarray) -> str:
    """Circle or square, by the covered share of its bounding box (soft edges count in part)."""
    widths, heights = cover.max(1).sum(1), cover.max(2).sum(1)
    filled = np.median(cover.sum(axis=(1, 2)) / (widths * heights))
    return "square" if filled > ROUND else "circle"


def read_mp4(path: Path) -> np.ndarray:
    """Reads a clip from an mp4 file: pixels [3,F,Y,X] in [-1,1]."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).transpose(3, 0, 1, 2) / 127.5 - 1


def load(source: Path, prompts: Path | None) -> tuple[list[np.ndarray], list[str]]:
    """Loads clips and prompts from a folder or an .npz file.

    Raises:
        ValueError: no prompts were found.
    """
    if source.suffix == ".npz":
        with np.load(source) as arrays:
            named = json.loads(prompts.read_text()) if prompts else [str(p) for p in arrays["prompts"]]
            return list(arrays["pixels"]), named
    listing = prompts or next(
        (source / n for n in ("prompts.json", "data.json") if (source / n).is_file()), None
    )
    if listing is None:
        raise ValueError(
            f"{source} contains neither prompts.json nor data.json: give the prompts with --prompts FILE"
        )
    rows = json.loads(listing.read_text())
    if rows and isinstance(rows[0], dict):
        files, named = [source / row["path"] for row in rows], [row["cap"] for row in rows]
    else:
        files, named = sorted(source.glob("*.mp4")), rows
    return [read_mp4(file) for file in files], named


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if colour and direction reach the required share, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of mp4 files, or an .npz file")
    parser.add_argument("--prompts", type=Path, help="JSON list of prompts, or rows {path, cap}")
    parser.add_argument(
        "--require",
        type=float,
        default=0.0,
        help="smallest share of right colours and directions (default: 0)",
    )
    options = parser.parse_args(arguments)
    try:
        result = score(*load(options.source, options.prompts))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(result.table())
    return 0 if min(result.colour, result.direction) >= options.require else 1


if __name__ == "__main__":
    sys.exit(main())
