"""Run by each rank: trains a real CustomDiT or a toy with the engine and writes what it saw.

usage: engine_ranks.py OUT CASE
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.contracts import Loss, Randomness
from mm_core.device import start_process_group
from mm_core.engines.fsdp2 import FSDP2Engine


class Toy(nn.Module):
    """Like blocks, a norm, a buffer table and a timestep input: what a predictor has."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.seen_timestep: torch.Tensor | None = None
        self.seen_dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        self.seen_timestep, self.seen_dtype = timestep.detach().clone(), x.dtype
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) * (1 + self.table.to(x.dtype)) + (timestep[:, None] / 1000).to(x.dtype)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=0.02)
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        self.table.copy_(torch.linspace(0, 1, self.table.numel()))


class ToyTask(nn.Module):
    trainable = ("predictor",)
    frozen = ()

    def __init__(self) -> None:
        super().__init__()
        self.predictor = Toy()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def make(optimizer=torch.optim.AdamW, **fields) -> tuple[ToyTask, FSDP2Engine]:
    with torch.device("meta"):
        task = ToyTask()
    engine = FSDP2Engine(**fields)
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(task, plan, lambda parameters: optimizer(parameters, lr=1e-3), Randomness(7))
    return task, engine


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The global batch of a step: 8 rows with uneven weights, some of them zero."""
    rng = Randomness(3).at("rows", step)
    x, y = rng.normal((8, 24), "x"), rng.normal((8, 24), "y")
    timestep = torch.linspace(1, 998.7, 8)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.0, 1.0])
    return x, y, timestep, weight


def rows_loss(task: ToyTask, batch: tuple[torch.Tensor, ...], cut: slice) -> Loss:
    x, y, timestep, weight = (tensor[cut] for tensor in batch)
    error = (task.predictor(x, timestep=timestep).float() - y).square().mean(1)
    return Loss((error * weight).sum(), float(weight.sum()))


def train(steps: int, micro: int, **fields) -> dict[str, object]:
    """`steps` AdamW steps of the same global batches, whatever the world and micro-batch size."""
    task, engine = make(**fields)
    world, rank = dist.get_world_size(), dist.get_rank()
    first: dict[str, torch.Tensor] = {}
    losses = []
    for step in range(steps):
        weight = rows(step)[-1]
        mine = [m for m in range(8 // micro) if m % world == rank]
        for index, m in enumerate(mine):
            compute = partial(rows_loss, task, rows(step), slice(m * micro, (m + 1) * micro))
            scale = world / float(weight.sum())
            loss = engine.micro_step(compute, last=index == len(mine) - 1, scale=scale)
            losses.append(float(loss.total))
        if step == 0:
            first = {name: full(p.grad) for name, p in engine.named_parameters()}
        engine.step(1.0)
    return {
        "gradients": first,
        "weights": {name: full(p) for name, p in engine.named_parameters()},
        "losses": losses,
        "timestep": task.predictor.seen_timestep,
        "dtype": task.predictor.seen_dtype,
    }


def initial_hash() -> str:
    task, _ = make()
    digest = hashlib.sha256()
    for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
        digest.update(name.encode() + full(tensor).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    out, case = Path(sys.argv[1]), sys.argv[2]
    start_process_group()
    if case == "init":
        result: object = initial_hash()
    elif case == "bf16":
        result = train(1, 4, param_dtype="bf16", sub_modules_to_wrap=("predictor.blocks.{*}",))
    elif case == "recompute":
        result = [
            train(3, 4),
            train(3, 4, recompute_modules="auto"),
            train(3, 4, recompute_modules="auto", use_reentrant=True),
        ]
    else:
        micro, size = case.split(",")
        result = train(
            20, int(micro), sharding_size=int(size) if size != "auto" else "auto", reduce_dtype=None
        )
    if dist.get_rank() == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
