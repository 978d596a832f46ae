"""Run by each rank: trains a LoRA of a real CustomDiT on a base that is resident or streamed.

usage: base_ranks.py OUT CASE
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from engine_ranks import SIZES, TinyDiT, rows, rows_loss

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.builtin.configs.engines import BaseConfig
from mm_core.contracts import Randomness
from mm_core.engines import fsdp2
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.modules.adapter_layers import adapter_of
from mm_core.parallel.streamed_base import StreamedBase
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import add_adapters
from mm_core.weights.fitting import formats_of
from support.rank_program import run_as_rank
from support.tensors import whole
from support.tiny_models import Task

BLOCKS = 6
RESIDENT = BaseConfig()


def task_of() -> Task:
    with torch.device("meta"):
        task = Task(predictor=TinyDiT(**SIZES | {"num_layers": BLOCKS}))
    adapter = AdapterConfig(targets=("predictor.blocks.{*}",), rank=2)
    add_adapters(task, [adapter], formats_of(get_registry(())))
    return task


class Counted(StreamedBase):
    """Counts the blocks on the device, those on their way included, whenever one comes: a stand-in for the
    device's memory, on the CPU."""

    most = 0

    def _come(self, index: int) -> None:
        super()._come(index)
        sizes = [_bytes_of(self._task.get_submodule(path)) for path in self._paths]
        coming = [block.arriving for block in self._blocks if block.arriving is not None]
        full = max(sizes)
        assert all(size in (full, 0) for size in sizes)
        assert all(sum(tensor.nbytes for tensor in tensors) == full for tensors in coming)
        Counted.most = max(Counted.most, sum(size > 0 for size in sizes) + len(coming))


def _bytes_of(block: torch.nn.Module) -> int:
    frozen = [p for name, p in block.named_parameters() if adapter_of(name) is None]
    return sum(p.nbytes for p in frozen if p.untyped_storage().nbytes() >= p.nbytes > p.element_size())


def train(base: BaseConfig, steps: int = 10, micro: int = 4, **fields):
    task = task_of()
    fields = {"recompute_modules": "auto"} | fields
    engine = FSDP2Engine(base=base, **fields)
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(task, plan, lambda named: torch.optim.AdamW(named.values(), lr=1e-2), Randomness(7))
    world, rank = dist.get_world_size(), dist.get_rank()
    losses = []
    for step in range(steps):
        weight = rows(step)["weight"]
        mine = [m for m in range(8 // micro) if m % world == rank]
        for index, m in enumerate(mine):
            compute = partial(rows_loss, task, rows(step), slice(m * micro, (m + 1) * micro))
            scale = world / float(weight.sum())
            loss = engine.micro_step(compute, last=index == len(mine) - 1, scale=scale)
            losses.append(float(loss.total))
        engine.step(engine.grad_norm(), 1.0)
    with engine.evaluating():
        held_out = float(rows_loss(task, rows(99), slice(0, 8)).total)
    state = {name: whole(tensor).clone() for name, tensor in engine.state_dict()["model"].items()}
    return {"losses": [*losses, held_out], "state": state, "plan": plan}


def main(out: str, case: str) -> None:
    dtype, keep, reentrant = case.split(",")
    fields = {"use_reentrant": reentrant == "reentrant"}
    fields |= {"param_dtype": dtype} if dtype == "bf16" else {}
    fsdp2.StreamedBase = Counted
    resident = train(RESIDENT, **fields)
    result = [resident, train(BaseConfig(stream=True, keep=int(keep)), **fields), Counted.most]
    if dist.get_rank() == 0:
        torch.save(result, out)


if __name__ == "__main__":
    run_as_rank(main)
