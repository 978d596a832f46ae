"""Simulates the order of an epoch over many ranks: each sample once, what a rank needs for it, and seconds.

    python benchmarks/order.py [--rows 100000000] [--ranks 1024] [--only shuffled|buckets]

Of every step, the micro-batches that all ranks read together are marked in a bitmap; of some steps, each
rank's own are compared with them. What a rank needs is the memory that its process grows by.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder
from mm_core.data.loading.buckets import Bucket
from mm_core.data.loading.sampler import BatchPlan, Order, SlotSpec

MICRO, ACCUMULATED = 4, 2
ALL_RANKS = 3  # steps of which each rank's micro-batches are read


class _Rows:
    """Rows of any size, as a dataset of clips has them; none is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    @cache  # noqa: B019
    def epoch_rows(self, epoch: int) -> torch.Tensor:
        """All rows."""
        return torch.arange(self.count)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def order_of(kind: str, rows: int, ranks: int) -> Order:
    """An order of `rows` samples for `ranks` ranks, shuffled or in twenty buckets of uneven sizes."""
    if kind == "shuffled":
        return BatchPlan(rows, MICRO, MICRO * ACCUMULATED * ranks, 1234, "random", drop_last=False)
    buckets = tuple(Bucket(1, 64 * (n + 1), 64, MICRO) for n in range(20))
    drawn = torch.randint(210, (rows,), generator=torch.Generator().manual_seed(0))
    bounds = torch.arange(1, 20).cumsum(0)
    samples = BucketedSamples(_Rows(rows), buckets, torch.bucketize(drawn, bounds, right=True))  # type: ignore[arg-type]
    return BucketOrder(samples, ACCUMULATED * ranks, ranks, 1234)


def simulate(kind: str, rows: int, ranks: int) -> int:
    """Reads the order of an epoch; prints RESULT lines, and returns how many samples are not read once."""
    before, began = _memory(), time.perf_counter()
    order = order_of(kind, rows, ranks)
    order.micro_batches(0, 0, ranks)
    first, grown = time.perf_counter() - began, _memory() - before
    began = time.perf_counter()
    for step in range(1, 11):
        order.micro_batches(step, 0, ranks)
    each = (time.perf_counter() - began) / 10
    steps = order.batches_per_epoch
    counts = torch.zeros(rows, dtype=torch.uint8)
    for step in range(steps):
        read = order.micro_batches(step, 0, 1)
        own = [slot.key.index for rows_ in read for slot in rows_ if slot.weight and not slot.key.epoch]
        counts.index_add_(0, torch.tensor(own), torch.ones(len(own), dtype=torch.uint8))
    wrong = int((counts != 1).sum())
    shared = range(0, steps, max(1, steps // ALL_RANKS))[:ALL_RANKS]
    apart = sum(_each_rank(order, step, ranks) != order.micro_batches(step, 0, 1) for step in shared)
    print(f"RESULT order_{kind}_not_once {wrong} 0 {'ok' if not wrong else 'short'}")
    print(f"RESULT order_{kind}_steps_apart {apart} 0 {'ok' if not apart else 'short'}")
    print(f"RESULT order_{kind}_rank_gib {grown / 2**30:.2f} - ok")
    print(f"RESULT order_{kind}_first_step_seconds {first:.1f} - ok")
    print(f"RESULT order_{kind}_step_ms {1000 * each:.1f} - ok", flush=True)
    return wrong + apart


def _each_rank(order: Order, step: int, ranks: int) -> list[list[SlotSpec]]:
    """The micro-batches of all ranks, in the order of one rank that reads them all."""
    read = [order.micro_batches(step, rank, ranks) for rank in range(ranks)]
    return [own[number] for number in range(len(read[0])) for own in read]


def _memory() -> int:
    """The most bytes that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Simulates each kind in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--only", choices=("shuffled", "buckets"))
    args = parser.parse_args()
    if args.only:
        return int(simulate(args.only, args.rows, args.ranks) > 0)
    command = [sys.executable, Path(__file__), "--rows", str(args.rows), "--ranks", str(args.ranks)]
    codes = [subprocess.call([*command, "--only", kind]) for kind in ("shuffled", "buckets")]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
