"""Run by each rank: trains a net with a trained and a frozen scalar.

usage: scalar_ranks.py OUT FIELDS [FROM]: writes norms, the training state and the average of the weights
after four steps. FIELDS: the engine's, and `optimizer`, a name in OPTIMIZERS. FROM: a state to begin with.
"""

from __future__ import annotations

import json
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from mm_core.config.sections import EMASection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.modules.initialise import keep_local_part
from mm_core.optim.adamw import adamw
from mm_core.optim.adamw_8bit import adamw_8bit
from mm_core.optim.ema import EMA
from mm_core.optim.muon import muon
from support.rank_program import run_as_rank
from support.tensors import all_whole
from support.tiny_models import Task

ROWS, ACCUMULATED, CLIP = 8, 2, 0.5
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

MUON = {"adamw_for": (), "adamw_lr": None, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
OPTIMIZERS = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "muon": partial(muon, **MUON, adjust_lr="match_rms_adamw"),
}


class Contrast(nn.Module):
    """Two layers and a temperature, as contrastive models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.bias = nn.Parameter(torch.empty(()), requires_grad=False)

    def init_weights(self) -> None:
        self.first.reset_parameters()
        self.last.reset_parameters()
        nn.init.constant_(self.logit_scale, 0.7)
        nn.init.constant_(self.bias, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()) * self.logit_scale.exp() + self.bias


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def main(out: str, fields: str, begin: str | None = None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        task = Task(net=Contrast())
    given = json.loads(fields)
    build = OPTIMIZERS[given.pop("optimizer", "adamw")]
    if build is OPTIMIZERS["muon"]:
        # torch's Muon rounds to bfloat16: a gradient that two ranks sum to another last bit may round to
        # another neighbour, 4e-3 away. Its steps in float32 leave only what the ranks do.
        torch.Tensor.bfloat16 = torch.Tensor.clone
    engine = FSDP2Engine(**given)

    def optimizer(parameters):
        return build([{"params": [*parameters.values()], "names": [*parameters]}], **OPTIONS)

    engine.prepare(task, engine.plan(task, world, 2), optimizer, Randomness(0))
    if begin is not None:
        stored = torch.load(begin)["state"]
        template = engine.state_template({name.rpartition(".")[0] for name in stored["optimizer"]})
        with torch.no_grad():
            for part, named in template.items():
                for name, tensor in named.items():
                    keep_local_part(tensor, stored[part][name])
    average = EMA(engine.shards, EMASection(decay=0.5, ramp=False))
    first = all_whole(engine.state_dict()["model"])
    x, y = (tensor.chunk(world)[rank] for tensor in rows())
    norms = []
    for number_of_steps in range(1, 5):
        for number, (a, b) in enumerate(zip(x.chunk(ACCUMULATED), y.chunk(ACCUMULATED), strict=True)):

            def compute(a=a, b=b) -> Loss:
                return Loss((task.net(a) - b).square().sum(), float(len(a)))

            engine.micro_step(compute, last=number == ACCUMULATED - 1, scale=world / ROWS)
        norms.append(engine.grad_norm())
        engine.step(norms[-1], CLIP)
        average.update(number_of_steps)
    state = {part: all_whole(named) for part, named in engine.state_dict().items()}
    with average.applied():
        state["average"] = all_whole(engine.state_dict()["model"])
    state["ema"] = all_whole(average.state_dict())
    if rank == 0:
        torch.save({"norms": norms, "first": first, "state": state}, out)


if __name__ == "__main__":
    run_as_rank(main)
