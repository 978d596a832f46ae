"""How fast videos become batches: the readers side by side, and the loader with 0, 1 and 2 workers.

Files are rendered here (seeded noise over a moving gradient, H.264). Rates of one machine say
little, so results are ratios, each the median over rounds that alternate the sides.
Usage: python benchmarks/data_loading.py [--rounds N] [--frames N] [--size HxW]
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

from mm_core.contracts import Randomness
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.media.readers import DecordReader, PyAVReader

CLIP = 17  # frames a sample
FPS = 24


def write_video(path: Path, frames: int, height: int, width: int, seed: int) -> None:
    """A clip with motion and texture, so that decoding has something to do."""
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
    """Frames a second of each side, a list over rounds; every round runs all sides, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        call()  # file cache, imports
    for turn in range(rounds):
        names = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for name in names:
            began = time.perf_counter()
            frames = sides[name]()
            rates[name].append(frames / (time.perf_counter() - began))
    return rates


def ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the rounds' ratios of two sides."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def print_table(title: str, rates: dict[str, list[float]]) -> None:
    """Median rates, for orientation."""
    print(title)
    for name, values in rates.items():
        print(f"  {name:<28}{statistics.median(values):10.0f} frames/s")


def readers(files: list[Path], frames: int, rounds: int) -> dict[str, list[float]]:
    """Each reader on a clip at the beginning and on one near the end of every file."""
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
    """The whole loader, an epoch each time: workers started, videos read, resized, batched."""
    dataset = VideoTextDataset(annotations, CLIP, side, side, random_start=True)
    plan = BatchPlan(samples, 2, 2, 0, "random", True)

    def epoch(workers: int) -> Callable[[], int]:
        def read() -> int:
            loader = MicroBatchLoader(
                dataset,
                plan,
                batch_transform=None,
                rng=Randomness(0),
                rank=0,
                data_parallel=1,
                start_step=0,
                end_step=plan.batches_per_epoch,
                workers=workers,
                prefetch=2,
                pin_memory=False,
                device_type="cpu",
            )
            return sum(batch.pixels.shape[0] * CLIP for batch in loader)

        return read

    return compare({f"{workers} workers": epoch(workers) for workers in (0, 1, 2)}, rounds)


def main() -> None:
    """Renders, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=240, help="frames a file")
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
    print_table(f"loader, samples of {CLIP} frames at 128x128, workers' start included", loaded)
    # No bar is set for data loading; the lines are there to be compared between versions.
    print(f"RESULT data_seek_cost_ratio {ratio(reading, 'pyav, start', 'pyav, end'):.2f} - ok")
    if "decord, start" in reading:
        print(f"RESULT data_pyav_over_decord_start {ratio(reading, 'pyav, start', 'decord, start'):.2f} - ok")
        print(f"RESULT data_pyav_over_decord_end {ratio(reading, 'pyav, end', 'decord, end'):.2f} - ok")
    for workers in (1, 2):
        gain = ratio(loaded, f"{workers} workers", "0 workers")
        print(f"RESULT data_{workers}_workers_over_none {gain:.2f} - ok")


if __name__ == "__main__":
    main()
