"""Run by each rank: an engine's norm, clipping, update and average against torch's functions over DTensors.

usage: local_ranks.py SHARDING_SIZE
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.config.sections import EMASection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.ema import EMA
from support.rank_program import run_as_rank
from support.tiny_models import Task

CLIP, STEPS = 0.5, 4
OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "NAdam, which keeps DTensors": partial(torch.optim.NAdam, lr=1e-2),
}


class Uneven(nn.Module):
    """Matrices and vectors of which ranks hold shards of different sizes, some of them none."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(5, 3), (7,), (1, 4), (3, 2, 2), (2,), (11, 3)]
        self.all = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def init_weights(self) -> None:
        for parameter in self.all:
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x.mean()).square().sum() for p in self.all]).sum()


def copy(tensor: DTensor) -> DTensor:
    return DTensor(tensor.to_local().detach().clone(), tensor._spec, requires_grad=False)


def engine_of(make, **fields) -> tuple[Task, FSDP2Engine]:
    with torch.device("meta"):
        task = Task(predictor=Uneven())
    engine = FSDP2Engine(**fields)
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(task, plan, lambda named: make(named.values()), Randomness(3))
    return task, engine


def compare(make, **fields) -> None:
    task, engine = engine_of(make, **fields)
    ema = EMA(engine.shards, EMASection(decay=0.9))
    theirs = {name: nn.Parameter(copy(p)) for name, p in engine.named_parameters()}
    averages = {name: copy(p) for name, p in theirs.items()}
    optimizer = make(theirs.values())
    for step in range(STEPS):
        x = torch.full((2,), 1.0 + step + dist.get_rank())
        engine.micro_step(lambda x=x: Loss(task.predictor(x), 1.0), last=True, scale=1.0)
        for name, parameter in engine.named_parameters():
            theirs[name].grad = copy(parameter.grad)
        norm = engine.grad_norm()
        gradients = [p.grad for p in theirs.values()]
        assert norm == float(torch.nn.utils.get_total_norm(gradients).full_tensor())
        engine.step(norm, CLIP)
        assert all(parameter.grad is None for _, parameter in engine.named_parameters())
        torch._foreach_mul_(gradients, CLIP / (norm + 1e-6))
        optimizer.step()
        decay = ema.decay
        ema.update(step)
        for name, average in averages.items():
            average.to_local().lerp_(theirs[name].to_local().detach(), 1 - decay)
    state = engine.state_dict()["optimizer"]
    assert len(state) == sum(len(optimizer.state[p]) for p in theirs.values())
    for name, parameter in engine.named_parameters():
        same(parameter, theirs[name])
        same(ema.state_dict()[name], averages[name])
        for key, value in optimizer.state[theirs[name]].items():
            same(state[f"{name}.{key}"], value)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to the bit, sharded alike."""
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor)
    if isinstance(ours, DTensor):
        assert (ours.placements, ours.shape) == (theirs.placements, theirs.shape)
        ours, theirs = ours.to_local(), theirs.to_local()
    assert torch.equal(ours, theirs)


def resumed(make, **fields) -> None:
    """A new engine that loads the state of one continues as that one does, whatever FSDP2 moved meanwhile."""
    task, engine = engine_of(make, **fields)

    def step(task: Task, engine: FSDP2Engine, number: int) -> None:
        engine.micro_step(lambda: Loss(task.predictor(torch.ones(2) * number), 1.0), last=True, scale=1.0)
        engine.step(engine.grad_norm(), CLIP)

    step(task, engine, 1)
    other, again = engine_of(make, **fields)
    again.load_state_dict(engine.state_dict())
    for number in (2, 3):
        step(task, engine, number)
        step(other, again, number)
    for part, tensors in engine.state_dict().items():
        for name, tensor in tensors.items():
            same(again.state_dict()[part][name], tensor)


def main(sharding_size: str) -> None:
    for make in OPTIMIZERS.values():
        compare(make, sharding_size=int(sharding_size))
    resumed(OPTIMIZERS["fused AdamW"], sharding_size=int(sharding_size))


if __name__ == "__main__":
    run_as_rank(main)
