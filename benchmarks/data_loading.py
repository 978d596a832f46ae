"""Measures how fast videos are read and batched: video readers compared, and the loader with 0, 1, 2 workers.

The script renders its files (seeded noise over a moving gradient, H.264). Absolute rates depend on the
machine, so results are ratios: each is the median over rounds that alternate the two sides. Usage: python
benchmarks/data_loading.py [--rounds N] [--frames N] [--size HxW]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import torch

from mm_core.contracts import DataRanks, Randomness
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.media.package_readers import DecordReader
from mm_core.data.media.readers import PyAVReader

CLIP = 17  # frames per sample
FPS = 24


def write_video(path: Path, frames: int, height: int, width: int, seed: int) -> None:
    """Writes a video with motion and texture, so that decoding is not trivial."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
    ramp = np.linspace(0, 190, width).astype(np.uint8)[None, :, None]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "veryfast", "crf": "23"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", FPS
        for index in range(frames):
            image = np.roll(np.broadcast_to(ramp, texture.shape) + texture, 3 * index, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image))))
        container.mux(stream.encode())


def compare(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Frames per second of each side in each round; every round runs all sides in turn."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        call()  # fills the file cache, runs imports
    for turn in range(rounds):
        names = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for name in names:
            began = time.perf_counter()
            frames = sides[name]()
            rates[name].append(frames / (time.perf_counter() - began))
    return rates


def ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of the ratio of two sides' frame rates."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def print_table(title: str, rates: dict[str, list[float]]) -> None:
    """Prints the median frame rates, for orientation."""
    print(title)
    for name, values in rates.items():
        print(f"  {name:<28}{statistics.median(values):10.0f} frames/s")


def readers(files: list[Path], frames: int, rounds: int) -> dict[str, list[float]]:
    """Measures each video reader on a clip at the start and on one near the end of every file."""
    kinds = {"pyav": PyAVReader()}
    if importlib.util.find_spec("decord"):
        kinds["decord"] = DecordReader()
    late = (frames - CLIP - 1) / FPS

    def reading(reader: PyAVReader | DecordReader, start: float) -> Callable[[], int]:
        times = [start + (k + 0.5) / FPS for k in range(CLIP)]
        return lambda: sum(len(reader.read(file, times)) for file in files)

    places = {"start": 0.0, "end": late}
    return compare(
        {
            f"{name}, {place}": reading(kind, at)
            for name, kind in kinds.items()
            for place, at in places.items()
        },
        rounds,
    )


def loading(annotations: Path, samples: int, side: int, rounds: int) -> dict[str, list[float]]:
    """Measures complete epochs of the data loader: start of workers, reading, resizing, batching."""
    dataset = VideoTextDataset(annotations, CLIP, side, side, random_start=True)
    plan = BatchPlan(samples, 2, 2, 0, "random", True)

    def epoch(workers: int) -> Callable[[], int]:
        def read() -> int:
            loader = MicroBatchLoader(
                dataset,
                plan,
                batch_transform=None,
                rng=Randomness(0),
                share=DataRanks(),
                steps=range(plan.batches_per_epoch),
                workers=workers,
                prefetch=2,
                pin_memory=False,
                device_type="cpu",
            )
            return sum(batch.pixels.shape[0] * CLIP for batch in loader)

        return read

    return compare({f"{workers} workers": epoch(workers) for workers in (0, 1, 2)}, rounds)


def main() -> None:
    """Renders videos, measures readers and loader, prints results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=240, help="frames per file")
    parser.add_argument("--size", default="360x640", help="height x width of the files")
    options = parser.parse_args()
    height, width = map(int, options.size.split("x"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.mp4" for index in range(12)]
        for index, file in enumerate(files):
            write_video(file, options.frames, height, width, index)
        annotations = Path(folder) / "data.json"
        annotations.write_text(json.dumps([{"path": file.name, "cap": "noise"} for file in files]))
        print(f"{len(files)} files of {options.frames} frames, {height}x{width}; {os.cpu_count()} cores")
        reading = readers(files[:4], options.frames, options.rounds)
        loaded = loading(annotations, len(files), 128, options.rounds)
    print_table(f"readers, {CLIP} consecutive frames", reading)
    print_table(f"loader, samples of {CLIP} frames at 128x128, including the start of workers", loaded)
    # Data loading has no bar: the lines serve to compare versions.
    print(f"RESULT data_seek_cost_ratio {ratio(reading, 'pyav, start', 'pyav, end'):.2f} - ok")
    if "decord, start" in reading:
        print(f"RESULT data_pyav_over_decord_start {ratio(reading, 'pyav, start', 'decord, start'):.2f} - ok")
        print(f"RESULT data_pyav_over_decord_end {ratio(reading, 'pyav, end', 'decord, end'):.2f} - ok")
    for workers in (1, 2):
        gain = ratio(loaded, f"{workers} workers", "0 workers")
        print(f"RESULT data_{workers}_workers_over_none {gain:.2f} - ok")


if __name__ == "__main__":
    main()
