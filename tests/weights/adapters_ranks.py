"""Run by each rank: a CustomDiT with adapters in sharded training.

usage: adapters_ranks.py OUT lora|dora
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from mm_custom_dit.model import CustomDiT

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.builtin.configs.training import AdamWConfig
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.adamw import adamw
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.weights.adapters.inject import AdapterWeights, add_adapters
from support.tensors import all_whole
from support.tiny_models import Task

SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "in_channels": 4, "out_channels": 4}
SIZES |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 32}


def main() -> None:
    start_process_group()
    torch.set_num_threads(1)
    dora = sys.argv[2] == "dora"
    adapters = (
        AdapterConfig(("to_q", "predictor.blocks.{*}.ffn"), rank=4, alpha=8, dora=dora),
        AdapterConfig(("to_q", "proj_out"), rank=2, name="second"),
    )
    with torch.device("meta"):
        task = Task(predictor=CustomDiT(**SIZES))
        add_adapters(task, adapters, {})
    options = {"sub_modules_to_wrap": ("predictor.blocks.{*}",), "param_dtype": None}
    engine = FSDP2Engine(**options, recompute_modules=("predictor.blocks.{*}",))
    plan = engine.plan(task, dist.get_world_size(), 2)

    def optimizer(parameters):
        return adamw([{"params": [*parameters.values()]}], **(asdict(AdamWConfig()) | {"lr": 1e-2}))

    engine.prepare(task, plan, optimizer, Randomness(0), AdapterWeights(task, adapters, {}))
    before, norms = all_whole(engine.state_dict()["model"]), []
    generator = torch.Generator().manual_seed(0)
    clips, text = torch.randn(4, 4, 2, 4, 4, generator=generator), torch.randn(4, 5, 16, generator=generator)
    target, mask = torch.randn(clips.shape, generator=generator), torch.ones(4, 5, dtype=torch.bool)
    mine = slice(dist.get_rank(), None, dist.get_world_size())

    def loss() -> Loss:
        found = task.predictor(
            latents=clips[mine], timestep=torch.arange(4.0)[mine] * 250, text=text[mine], text_mask=mask[mine]
        )
        return Loss((found - target[mine]).square().mean((1, 2, 3, 4)).sum(), float(len(found)))

    for _ in range(3):
        engine.micro_step(loss, last=True, scale=dist.get_world_size() / 4)
        norms.append(engine.grad_norm())
        engine.step(norms[-1], None)
    found = {"before": before, "after": all_whole(engine.state_dict()["model"]), "norms": norms}
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
    leave(0)
