"""Run by each rank: a tiny Wan transformer, begun from a folder, trained three steps.

usage: wan_ranks.py OUT FOLDER VARIANT
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mm_wan.transformer import WanTransformer
from torch import nn
from torch.distributed.tensor import DTensor
from wan_variants import inputs

from mm_core.contracts import Loss, Randomness
from mm_core.device import start_process_group
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.train.failure import leave
from mm_core.train.initial_weights import FromFiles

BLOCKS = ("predictor.blocks.{*}",)


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.predictor = WanTransformer(from_pretrained=folder)


def main() -> None:
    out, folder, variant = sys.argv[1:]
    start_process_group()
    torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        task = Task(folder)
    engine = FSDP2Engine(sub_modules_to_wrap=BLOCKS, recompute_modules=BLOCKS, param_dtype=None)
    config = SimpleNamespace(
        plugins=SimpleNamespace(path=()),
        init_from=None,
        train=SimpleNamespace(adapters=()),
        allow_code=False,
    )
    plan = engine.plan(task, world, 2)
    # SGD: a step is as exact as its gradient, where AdamW makes a sign of a gradient near zero.
    engine.prepare(
        task, plan, lambda p: torch.optim.SGD(p.values(), lr=1e-2), Randomness(0), FromFiles(config, task)
    )
    seen = {
        "wrapped": list(plan.wrapped),
        "begun": weights(engine),
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
    seen["trained"] = weights(engine)
    if rank == 0:
        torch.save(seen, out)
    dist.barrier()


def weights(engine: FSDP2Engine) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in engine.state_dict()["model"].items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    main()
    leave(0)
