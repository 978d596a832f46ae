"""Run by each rank: trains a net with and without a sharding plan of its own.

usage: shard_plan_ranks.py OUT FIELDS: writes norms, weights and the prefetching that is set, by the names of
PLANS.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mm_core.contracts import Loss, Randomness, ShardPlan
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.adamw import adamw
from support.rank_program import run_as_rank
from support.tensors import all_whole
from support.tiny_models import Task

ROWS, ACCUMULATED = 8, 2
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PLANS = {
    "plain": None,
    "plan": ShardPlan(wrap=("blocks.{*}", "last"), recompute=("blocks.{*}",), prefetch=2),
    "order": ShardPlan(prefetch={"blocks.2": ("blocks.0", "blocks.1"), "blocks.0": ("blocks.1",)}),
}


class Net(nn.Module):
    """Blocks of which the last runs first."""

    def __init__(self, plan: ShardPlan | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 3)
        if plan is not None:
            self.shard_plan = lambda: plan

    def init_weights(self) -> None:
        for layer in (*self.blocks, self.last):
            layer.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (2, 0, 1):
            x = x + self.blocks[index](x).tanh()
        return self.last(x)


def prefetching(net: nn.Module) -> dict[str, dict[str, list[str]]]:
    """What torch gathers ahead: direction -> wrapped module -> modules."""
    sharded = {name: module for name, module in net.named_modules() if isinstance(module, FSDPModule)}
    names = {id(module._get_fsdp_state()): name for name, module in sharded.items()}
    return {
        way: {
            name: [
                names[id(state)] for state in getattr(module._get_fsdp_state(), f"_states_to_{way}_prefetch")
            ]
            for name, module in sharded.items()
        }
        for way in ("forward", "backward")
    }


def train(plan: ShardPlan | None, fields: dict[str, object]) -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        task = Task(net=Net(plan))
    engine = FSDP2Engine(param_dtype=None, **fields)
    planned = engine.plan(task, world, 2)
    engine.prepare(
        task, planned, lambda named: adamw([{"params": [*named.values()]}], **OPTIONS), Randomness(0)
    )
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, n, generator=generator).chunk(world)[rank] for n in (5, 3))
    norms = []
    for _ in range(3):
        for number, (a, b) in enumerate(zip(x.chunk(ACCUMULATED), y.chunk(ACCUMULATED), strict=True)):

            def compute(a=a, b=b) -> Loss:
                return Loss((task.net(a) - b).square().sum(), float(len(a)))

            engine.micro_step(compute, last=number == ACCUMULATED - 1, scale=world / ROWS)
        norms.append(engine.grad_norm())
        engine.step(norms[-1], None)
    recomputed = [
        path for path in planned.recomputed if hasattr(task.get_submodule(path).forward, "__wrapped__")
    ]
    return {
        "norms": norms,
        "weights": all_whole(engine.state_dict()["model"]),
        "prefetch": prefetching(task.net),
        "recomputed": recomputed,
    }


def main(out: str, fields: str) -> None:
    found = {name: train(plan, json.loads(fields)) for name, plan in PLANS.items()}
    if dist.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    run_as_rank(main)
