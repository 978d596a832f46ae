"""Run by each rank: counts the FLOPs of a sharded step in its first micro-batch.

usage: flops_ranks.py ARCHITECTURE ACCUMULATION ROWS (recompute | plain)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from mm_custom_dit.model import CustomDiT

from mm_core.builtin.configs.training import AdamWConfig
from mm_core.config.sections import TrainSection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.adamw import adamw
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.telemetry.flop_counter import ForwardFlops
from support.tiny_models import Task


def main(architecture: dict[str, Any], accumulation: int, rows: int, recompute: bool) -> None:
    start_process_group()
    with torch.device("meta"):
        task = Task(predictor=CustomDiT(**architecture))
    blocks = ("predictor.blocks.{*}",)
    engine = FSDP2Engine(
        sub_modules_to_wrap=blocks, recompute_modules=blocks if recompute else (), param_dtype="bf16"
    )
    plan = engine.plan(task, dist.get_world_size(), 2)
    settings = vars(AdamWConfig(lr=1e-3))
    engine.prepare(
        task, plan, lambda p: adamw(groups_of(p, TrainSection(steps=1)), **settings), Randomness(0)
    )
    flops = ForwardFlops()
    for index in range(accumulation):

        def compute() -> Loss:
            text = torch.randn(rows, 5, 10)
            with flops.counting():
                out = task.predictor(
                    latents=torch.randn(rows, 3, 2, 4, 6),
                    timestep=torch.rand(rows) * 1000,
                    text=text,
                    text_mask=torch.ones(rows, 5, dtype=torch.bool),
                )
                return Loss(out.float().square().sum(), float(rows))

        engine.micro_step(compute, last=index == accumulation - 1, scale=1.0)
    engine.step(engine.grad_norm(), None)
    step = flops.of_step(accumulation)
    print(f"STEP {step:.0f}")
    leave(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "recompute")
