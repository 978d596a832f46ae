"""Measures a save of 1 GB of state: how long training is blocked, and how fast the bytes reach the disk.

    python benchmarks/checkpoint.py [--megabytes 1024] [--rounds 15]

Each round runs, in random order on the same idle disk: plain writes of the same bytes to one file, flushed; a
synchronous save; an asynchronous save, whose time until `save` returns is the stall. Results are medians
of the rounds' ratios, since the disk is shared: on a busy machine, single ratios vary by a factor of three
and more.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mm_core.checkpoint.store import CheckpointStore


def make_state(megabytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """State of a transformer for a checkpoint: weights and two AdamW moments, float32, in a few large
    matrices."""
    width = 1024
    blocks = max(1, megabytes * 2**20 // (3 * 4 * 12 * width * width))
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    model, optimizer = {}, {}
    for block in range(blocks):
        for name, shape in shapes.items():
            key = f"predictor.blocks.{block}.{name}.weight"
            model[key] = torch.randn(shape)
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer[f"{key}.{moment}"] = torch.randn(shape)
    return {"model": model, "optimizer": optimizer}


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plain(path: Path, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Writes the same bytes as a checkpoint to one file, without a checkpoint's work, and flushes it."""
    with path.open("wb", buffering=0) as file:
        for named in state.values():
            for tensor in named.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(file.fileno())
    path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", help="folder for checkpoints (default: a temporary folder)")
    args = parser.parse_args()
    state = make_state(args.megabytes)
    size = sum(tensor.numel() * 4 for named in state.values() for tensor in named.values())
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    print(f"{size / 1e9:.2f} GB of state, {args.rounds} rounds")
    columns = ("plain s", "sync s", "stall s", "async s", "stall/sync", "plain/sync", "plain/async")
    print("round", *(f"{column:>11}" for column in columns))
    stalls, speeds, behind = [], [], []
    chance = random.Random(0)
    try:
        sync = CheckpointStore(folder / "sync", keep=1)
        own = CheckpointStore(folder / "async", keep=1, asynchronous=True)
        own.reserve(state)
        own.save(1, state, {}, "x: 1\n")  # the buffers are there from now on
        own.wait()
        for step in range(2, args.rounds + 2):

            def behind_the_back(step: int = step) -> None:
                nonlocal stall
                stall = seconds(lambda: own.save(step, state, {}, "x: 1\n"))
                own.wait()

            stall = 0.0
            calls = {
                "plain": lambda: plain(folder / "plain", state),
                "sync": lambda step=step: sync.save(step, state, {}, "x: 1\n"),
                "async": behind_the_back,
            }
            # Without this, pending writes of one variant would slow down the next.
            turn = chance.sample(sorted(calls), k=3)
            took = {}
            for name in turn:
                os.sync()
                took[name] = seconds(calls[name])
            bare, whole, total = took["plain"], took["sync"], took["async"]
            stalls.append(stall / whole)
            speeds.append(bare / whole)
            behind.append(bare / total)
            row = (bare, whole, stall, total, stalls[-1], speeds[-1], behind[-1])
            print(f"{step - 1:>5}", *(f"{value:>11.3f}" for value in row), "", *turn, flush=True)
        own.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stall, speed = statistics.median(stalls), statistics.median(speeds)
    print(
        f"speed of the asynchronous save against plain writes, copy included: {statistics.median(behind):.3f}"
    )
    print(f"RESULT checkpoint_stall {stall:.3f} <=0.15 {'ok' if stall <= 0.15 else 'short'}")
    print(f"RESULT checkpoint_write_speed {speed:.3f} >=0.8 {'ok' if speed >= 0.8 else 'short'}")
    return 0 if stall <= 0.15 and speed >= 0.8 else 1


if __name__ == "__main__":
    raise SystemExit(main())
