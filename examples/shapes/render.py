"""Renders captioned clips of moving shapes to H.264 mp4 files, which a small model learns in minutes.

    python examples/shapes/render.py --out data/shapes --clips 512 --seed 0

Writes `videos/*.mp4`, the annotation file `data.json`, and `held_out.json`: captions of colour, shape
and direction combinations that no clip shows, to sample from after training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

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


def draw_scene(combination: Sequence[str], rng: random.Random, size: int, frames: int) -> Scene:
    """Draws a random scene of a combination: the shape stays within the frame and crosses nearly all of it.

    Slow motion is decided at high noise and hard to learn. With a long path, the first frame's shape is
    also near the edge opposite to its direction, which makes the direction easy to learn.
    """
    colour, shape, direction = combination
    side = size * rng.uniform(0.25, 0.35)
    travel = rng.uniform(0.85, 1.0) * (size - side)
    dx, dy = DIRECTIONS[direction]
    centre = []
    for step in (dx, dy):
        low, high = side / 2, size - side / 2
        if step > 0:
            high -= travel
        elif step < 0:
            low += travel
        centre.append(rng.uniform(low, high))
    return Scene(colour, shape, direction, side, travel / (frames - 1), centre[0], centre[1])


def draw(scene: Scene, size: int, frames: int) -> np.ndarray:
    """Renders a scene to frames uint8 [F,size,size,3], antialiased by supersampling."""
    fine = (np.arange(size * _SUPERSAMPLING) + 0.5) / _SUPERSAMPLING
    dx, dy = DIRECTIONS[scene.direction]
    colour, background = (np.array(c, dtype=np.float64) for c in (COLOURS[scene.colour], BACKGROUND))
    clip = np.empty((frames, size, size, 3), dtype=np.uint8)
    for frame in range(frames):
        across = fine[None, :] - (scene.x + dx * scene.speed * frame)
        down = fine[:, None] - (scene.y + dy * scene.speed * frame)
        half = scene.side / 2
        if scene.shape == "circle":
            inside = across**2 + down**2 <= half**2
        else:
            inside = (abs(across) <= half) & (abs(down) <= half)
        cover = inside.reshape(size, _SUPERSAMPLING, size, _SUPERSAMPLING).mean(axis=(1, 3))[..., None]
        clip[frame] = np.rint(cover * colour + (1 - cover) * background)
    return clip


def write_mp4(path: Path, clip: np.ndarray, fps: int) -> None:
    """Writes a clip as H.264 with full chroma resolution: at 16x16, half the resolution would blur the
    colours."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "6", "preset": "veryfast"})
        stream.height, stream.width = clip.shape[1:3]
        stream.pix_fmt = "yuv444p"
        stream.thread_count = 1
        for image in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def render(out: Path, clips: int, seed: int, size: int, frames: int, fps: int, prompts: int) -> None:
    """Writes the dataset of moving shapes. `data.json` is written last, so an interrupted run leaves no
    dataset.

    Args:
        out: output folder.
        clips: number of clips.
        seed: seed for places, sizes and speeds.
        size: side of the frames in pixels.
        frames: frames per clip.
        fps: frames per second.
        prompts: number of captions in held_out.json.
    """
    (out / "videos").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(clips):
        rng = random.Random(f"{seed}/{index}")
        scene = draw_scene(TRAINED[index % len(TRAINED)], rng, size, frames)
        name = f"videos/{index:05d}.mp4"
        write_mp4(out / name, draw(scene, size, frames), fps)
        rows.append(
            {
                "path": name,
                "cap": caption(scene.colour, scene.shape, scene.direction),
                "num_frames": frames,
                "fps": fps,
                "resolution": {"height": size, "width": size},
            }
        )
    held_out = [caption(*HELD_OUT[index % len(HELD_OUT)]) for index in range(prompts)]
    (out / "held_out.json").write_text(json.dumps(held_out, indent=1) + "\n")
    (out / "data.json").write_text(json.dumps(rows, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data/shapes"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--clips", type=int, default=512, help="clips to render (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for places, sizes and speeds (default: %(default)s)"
    )
    parser.add_argument("--size", type=int, default=16, help="pixels per side, even (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=8, help="frames per clip (default: %(default)s)")
    parser.add_argument("--fps", type=int, default=8, help="frames per second (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=32, help="number of captions in held_out.json (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.clips < 1 or options.size < 16 or options.size % 2 or options.frames < 2 or options.fps < 1:
        parser.error("needs at least 1 clip, 2 frames, 1 frame per second, and an even size of 16 or more")
    began = time.perf_counter()
    render(
        options.out, options.clips, options.seed, options.size, options.frames, options.fps, options.prompts
    )
    print(
        f"rendered {options.clips} clips of {options.frames}x{options.size}x{options.size} "
        f"to {options.out} in {time.perf_counter() - began:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
