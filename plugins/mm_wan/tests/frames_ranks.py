"""Run by each rank: text_to_video of a tiny image-to-video checkpoint, three steps on four clips.

usage: frames_ranks.py OUT FOLDER VARIANT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from wan_frames import config_at
from wan_ranks import BLOCKS

from mm_core.contracts import Randomness, SampleKey, VideoTextBatch
from mm_core.contracts.engine import _DTYPES
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.frozen import load_frozen_of
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plan import build_frozen, build_task
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from support.tensors import all_whole, whole

RNG = Randomness(5)


def row_of(row: int) -> VideoTextBatch:
    """One smooth clip."""
    coarse = RNG.normal((1, 3, 3, 3, 5), "clip", row)
    pixels = torch.nn.functional.interpolate(coarse, (5, 32, 64), mode="trilinear").tanh()
    captions = [f"a red circle {row}"]
    return VideoTextBatch([SampleKey(0, row)], torch.ones(1), captions, pixels=pixels, captions=captions)


def main() -> None:
    out, folder, variant = sys.argv[1:]
    start_process_group()
    torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    place = Path(f"{out}.{rank}")
    place.mkdir()
    config = config_at(place, Path(folder), variant)
    task = build_task(config)
    build_frozen(task)
    load_frozen_of(task, FSDP2Engine(), FSDP2Engine().plan(task, 1, 0), config.registry)
    pair = variant.endswith("high_low")
    blocks = ("predictor.{*}.blocks.{*}",) if pair else BLOCKS
    wrapped = (*blocks, "predictor.{*}") if pair else blocks
    # Computed in float64, which no config offers: in float32 a parameter whose gradient is all but zero
    # differs between sums over one and over two ranks by as much as 2e-5 of it.
    _DTYPES["float64"] = torch.float64
    engine = FSDP2Engine(sub_modules_to_wrap=wrapped, recompute_modules=blocks, param_dtype="float64")
    # SGD: a step is as exact as its gradient, where AdamW makes a sign of a gradient near zero.
    engine.prepare(
        task,
        engine.plan(task, world, 2),
        lambda p: torch.optim.SGD(p.values(), lr=1e-2),
        Randomness(0),
        FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters),
    )
    seen = {"begun": all_whole(engine.state_dict()["model"]), "losses": [], "experts": []}
    for step in range(3):
        task.begin_step(step)
        rows = [row for row in range(4) if row % world == rank]
        total = torch.zeros(())
        for row in rows:
            inputs = task.prepare(row_of(row), RNG.at(step))
            seen["experts"].append(inputs.expert)
            total += engine.micro_step(lambda: task.loss(inputs), last=row == rows[-1], scale=world / 4).total  # noqa: B023
        dist.all_reduce(total)
        seen["losses"].append(float(total))
        if step == 0:
            seen["gradients"] = {
                name: whole(p.grad) for name, p in engine.named_parameters() if p.grad is not None
            }
        engine.step(engine.grad_norm(), 1.0)
    seen["trained"] = all_whole(engine.state_dict()["model"])
    if rank == 0:
        torch.save(seen, out)
    dist.barrier()


if __name__ == "__main__":
    main()
    leave(0)
