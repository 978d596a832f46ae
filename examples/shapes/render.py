"""Renders captioned clips of moving shapes to H.264 mp4 files, which a small model learns in minutes.

    python examples/shapes/render.py --out data/shapes --clips 512 --seed 0

Writes `videos/*.mp4`, the annotation file `data.json`, and `held_out.json`: captions of colour, shape
and direction combinations that no clip shows, to sample from after training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np

from mm_core.data import moving_shapes


def write_mp4(path: Path, clip: np.ndarray, fps: int, lossless: bool = False) -> None:
    """Writes a clip as H.264 with full chroma resolution: at 16x16, half the resolution would blur the
    colours. `lossless`: with the same pixels, whatever encodes it."""
    codec, pix_fmt, quality = ("libx264rgb", "rgb24", "qp") if lossless else ("libx264", "yuv444p", "crf")
    options = {quality: "0" if lossless else "6", "preset": "veryfast"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = clip.shape[1:3]
        stream.pix_fmt = pix_fmt
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
    trained, held_out = moving_shapes.TRAINED, moving_shapes.HELD_OUT
    rows = []
    for index in range(clips):
        rng = random.Random(f"{seed}/{index}")
        scene = moving_shapes.draw_scene(trained[index % len(trained)], rng, (size, size), frames)
        name = f"videos/{index:05d}.mp4"
        write_mp4(out / name, moving_shapes.draw(scene, (size, size), frames), fps)
        rows.append(
            {
                "path": name,
                "cap": moving_shapes.caption(scene.colour, scene.shape, scene.direction),
                "num_frames": frames,
                "fps": fps,
                "resolution": {"height": size, "width": size},
            }
        )
    captions = [moving_shapes.caption(*held_out[index % len(held_out)]) for index in range(prompts)]
    (out / "held_out.json").write_text(json.dumps(captions, indent=1) + "\n")
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
