"""Measures what a data worker costs: processor time of a sample, and bytes that it hands over.

    python benchmarks/data_worker.py [--rounds 12] [--frames 49] [--size 720x1280] [--to 480x832]

A sample of `video_text` (decoded, resized by its short side, cropped) is compared with bare PyAV in one
thread and the same resize by torch, both to uint8 pixels. Rounds alternate the two; the ratio is the median
over the rounds of processor time. The bytes are those of a batch from a worker process: what is pickled, and
the shared memory that its tensors occupy, against the uint8 pixels of its samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import av
import torch
import torch.nn.functional as F
from data_loading import write_video
from data_rows import result
from torch import Tensor

from mm_core.contracts import DataRanks, Randomness, VideoTextBatch
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan

TIME_BAR, BYTES_BAR = 1.05, 1.02


def bare(path: Path, frames: int, height: int, width: int) -> Tensor:
    """The first frames of a video, uint8 [3,F,height,width], by hand."""
    pixels = torch.empty(3, frames, height, width, dtype=torch.uint8)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for index, frame in zip(range(frames), container.decode(stream), strict=False):
            image = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
            scale = max(height / image.shape[1], width / image.shape[2])
            size = round(image.shape[1] * scale), round(image.shape[2] * scale)
            image = F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
            top, left = (size[0] - height) // 2, (size[1] - width) // 2
            pixels[:, index] = image[:, top : top + height, left : left + width]
    return pixels


def handed_over(dataset: VideoTextDataset, micro_batch: int) -> float:
    """Bytes of a batch as a worker hands it over, over those of its uint8 pixels."""
    plan = BatchPlan(
        num_samples=len(dataset),
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch,
        seed=1,
        order="sequential",
        drop_last=True,
    )
    loader = MicroBatchLoader(
        dataset,
        plan,
        batch_transform=None,
        rng=Randomness(1),
        share=DataRanks(),
        steps=range(1),
        workers=1,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )
    batch = next(iter(loader))
    assert isinstance(batch, VideoTextBatch)
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    # Tensors are pickled as names of shared memory, which holds their whole storage.
    shared = sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})
    pickled = len(ForkingPickler.dumps(batch))
    wanted = micro_batch * dataset[0]["pixels"].numel()
    return (shared + pickled) / wanted


def main() -> int:
    """Runs the rounds, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--frames", type=int, default=49)
    parser.add_argument("--size", default="720x1280")
    parser.add_argument("--to", default="480x832")
    args = parser.parse_args()
    source, (height, width) = (tuple(map(int, text.split("x"))) for text in (args.size, args.to))
    torch.set_num_threads(1)  # as in data workers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"path": f"{number}.mp4", "cap": "a clip"} for number in range(2)]
        for number, row in enumerate(rows):
            write_video(folder / row["path"], args.frames + 1, *source, seed=number)
        (folder / "rows.json").write_text(json.dumps(rows))
        dataset = VideoTextDataset(folder / "rows.json", args.frames, height, width)
        sides = {
            "bare": lambda: bare(folder / "0.mp4", args.frames, height, width),
            "ours": lambda: dataset[0]["pixels"],
        }
        assert torch.equal(sides["bare"](), sides["ours"]()), "both make the same pixels"
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        print(f"{args.frames} frames of {args.size} to {args.to}")
        print(f"{'round':>5} {'bare':>8} {'ours':>8} {'ratio':>6}")
        for number in range(args.rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                began = time.process_time()
                sides[side]()
                seconds[side].append(time.process_time() - began)
            base, ours = seconds["bare"][-1], seconds["ours"][-1]
            print(f"{number + 1:5d} {base:8.3f} {ours:8.3f} {ours / base:6.3f}", flush=True)
        ratios = [ours / base for base, ours in zip(seconds["bare"], seconds["ours"], strict=True)]
        good = result("data_worker_processor_time", statistics.median(ratios), TIME_BAR)
        good &= result("data_worker_bytes", handed_over(dataset, 2), BYTES_BAR)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
