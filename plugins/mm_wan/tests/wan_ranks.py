"""Run by each rank: a tiny Wan transformer, begun from a folder, trained three steps.

usage: wan_ranks.py OUT FOLDER VARIANT
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mm_wan.predictor.transformer import WanTransformer
from wan_variants import inputs

from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from support.tensors import all_whole, whole
from support.tiny_models import Task

BLOCKS = ("predictor.blocks.{*}",)


def main() -> None:
    out, folder, variant = sys.argv[1:]
    start_process_group()
    torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        task = Task(predictor=WanTransformer(from_pretrained=folder))
    engine = FSDP2Engine(sub_modules_to_wrap=BLOCKS, recompute_modules=BLOCKS, param_dtype=None)
    config = SimpleNamespace(
        registry=get_registry(),
        init_from=None,
        train=SimpleNamespace(adapters=()),
        allow_code=False,
    )
    plan = engine.plan(task, world, 2)
    # SGD: a step is as exact as its gradient, where AdamW makes a sign of a gradient near zero.
    engine.prepare(
        task,
        plan,
        lambda p: torch.optim.SGD(p.values(), lr=1e-2),
        Randomness(0),
        FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters),
    )
    seen = {
        "wrapped": list(plan.wrapped),
        "begun": all_whole(engine.state_dict()["model"]),
        "rotary": task.predictor.rope.freqs_cos.clone(),
        "losses": [],
    }
    batch = inputs(variant)
    target = torch.linspace(-1, 1, batch["latents"].numel()).view_as(batch["latents"])
    for step in range(3):
        losses = []
        rows = [row for row in range(2) if row % world == rank]
        for row in rows:

            def compute(row: int = row) -> Loss:
                given = {name: tensor[row : row + 1] for name, tensor in batch.items()}
                return Loss((task.predictor(**given) - target[row : row + 1]).square().mean(), 1.0)

            loss = engine.micro_step(compute, last=row == rows[-1], scale=world / 2)
            losses.append(loss.total)
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        seen["losses"].append(float(total))
        if step == 0:
            seen["gradients"] = {name: whole(p.grad) for name, p in engine.named_parameters()}
        engine.step(engine.grad_norm(), 1.0)
    seen["trained"] = all_whole(engine.state_dict()["model"])
    if rank == 0:
        torch.save(seen, out)
    dist.barrier()


if __name__ == "__main__":
    main()
    leave(0)
