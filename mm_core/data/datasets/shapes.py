"""Captioned clips of moving shapes, which a small model learns in minutes. They are drawn, without files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from mm_core.builtin.configs.data import ShapesConfig
from mm_core.contracts import Randomness, Source, VideoTextBatch
from mm_core.data.datasets.video_text import collate_clips

COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (40, 70, 240), "yellow": (235, 215, 30)}
SHAPES = ("circle", "square")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # steps along (x, y)
BACKGROUND = (16, 16, 16)

HELD_OUT = (
    ("red", "circle", "left"),
    ("green", "square", "right"),
    ("blue", "circle", "up"),
    ("yellow", "square", "down"),
    ("red", "square", "up"),
    ("blue", "square", "left"),
)
"""Combinations that do not occur in training. Each pair of their parts does."""

TRAINED = tuple(
    combination
    for combination in itertools.product(COLOURS, SHAPES, DIRECTIONS)
    if combination not in HELD_OUT
)

_SUPERSAMPLING = 8


def caption(colour: str, shape: str, direction: str) -> str:
    """Caption of a clip with this colour, shape and direction."""
    return f"a {colour} {shape} moves {direction}"


@dataclass(frozen=True)
class Scene:
    """One clip of a moving shape.

    Attributes:
        colour: a key of COLOURS.
        shape: one of SHAPES.
        direction: a key of DIRECTIONS.
        side: side or diameter of the shape, in pixels.
        speed: pixels per frame.
        x: centre in the first frame, in pixels.
        y: centre in the first frame, in pixels.
    """

    colour: str
    shape: str
    direction: str
    side: float
    speed: float
    x: float
    y: float


def draw_scene(combination: Sequence[str], rng: random.Random, size: tuple[int, int], frames: int) -> Scene:
    """Draws a random scene of a combination: the shape stays within the frame and crosses nearly all of it.

    Slow motion is decided at high noise and hard to learn. With a long path, the first frame's shape is
    also near the edge opposite to its direction, which makes the direction easy to learn.

    Args:
        combination: colour, shape and direction.
        rng: source of sizes, places and speeds.
        size: height and width of the frames in pixels.
        frames: frames per clip.
    """
    colour, shape, direction = combination
    side = min(size) * rng.uniform(0.25, 0.35)
    dx, dy = DIRECTIONS[direction]
    height, width = size
    travel = rng.uniform(0.85, 1.0) * ((width if dx else height) - side)
    centre = []
    for step, extent in ((dx, width), (dy, height)):
        low, high = side / 2, extent - side / 2
        if step > 0:
            high -= travel
        elif step < 0:
            low += travel
        centre.append(rng.uniform(low, high))
    return Scene(colour, shape, direction, side, travel / max(1, frames - 1), centre[0], centre[1])


def draw(scene: Scene, size: tuple[int, int], frames: int) -> np.ndarray:
    """Renders a scene to frames uint8 [F,Y,X,3] of a height and width, antialiased by supersampling."""
    height, width = size
    fine_y, fine_x = ((np.arange(n * _SUPERSAMPLING) + 0.5) / _SUPERSAMPLING for n in size)
    dx, dy = DIRECTIONS[scene.direction]
    colour, background = (np.array(c, dtype=np.float64) for c in (COLOURS[scene.colour], BACKGROUND))
    clip = np.empty((frames, height, width, 3), dtype=np.uint8)
    for frame in range(frames):
        across = fine_x[None, :] - (scene.x + dx * scene.speed * frame)
        down = fine_y[:, None] - (scene.y + dy * scene.speed * frame)
        half = scene.side / 2
        if scene.shape == "circle":
            inside = across**2 + down**2 <= half**2
        else:
            inside = (abs(across) <= half) & (abs(down) <= half)
        cover = inside.reshape(height, _SUPERSAMPLING, width, _SUPERSAMPLING).mean(axis=(1, 3))[..., None]
        clip[frame] = np.rint(cover * colour + (1 - cover) * background)
    return clip


class ShapesDataset:
    """Clips of coloured circles and squares that move in one direction, which their captions name.

    Clip i depends on the seed and i alone. Six of the 32 combinations never occur (`HELD_OUT`): a trained
    model can be asked for them. Satisfies `Dataset`.

    Args:
        num_frames: frames of a clip.
        height: in pixels.
        width: in pixels.
        others: further fields of `ShapesConfig`.
    """

    def __init__(self, num_frames: int, height: int, width: int, **others: Any) -> None:
        self.wanted = ShapesConfig(num_frames, height, width, **others)

    def __len__(self) -> int:
        return self.wanted.clips

    def num_sources(self) -> int:
        """Number of clips, for the feature cache."""
        return len(self)

    def source_of(self, row: int, size: tuple[int, int, int] | None, rng: Randomness | None) -> Source:
        """What decides a clip, for the feature cache: it is drawn, so there is no file."""
        made = {**asdict(self.wanted), "clips": None}
        return Source(f"clip {row}", caption(*TRAINED[row % len(TRAINED)]), made, drawn=(row,))

    def __getitem__(self, index: int) -> dict[str, Any]:
        wanted = self.wanted
        size = (wanted.height, wanted.width)
        rng = random.Random(f"{wanted.seed}/{index}")
        scene = draw_scene(TRAINED[index % len(TRAINED)], rng, size, wanted.num_frames)
        frames = torch.from_numpy(draw(scene, size, wanted.num_frames))
        return {
            "pixels": frames.permute(3, 0, 1, 2).float() / 127.5 - 1,
            "caption": caption(scene.colour, scene.shape, scene.direction),
            "id": f"clip {index}",
            "fps": wanted.fps,
        }

    def collate(self, samples: Sequence[dict[str, Any]]) -> VideoTextBatch:
        """Collates clips into a batch; the loader has added `key` and `weight` to each sample."""
        return collate_clips(samples)
