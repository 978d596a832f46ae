"""Run by each rank: trains a step and writes the planned and the largest seen bytes of gathered parameters.

usage: memory_ranks.py OUT
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from test_memory import prepared
from torch.distributed.tensor import DTensor

from mm_core.contracts import Loss
from mm_core.engines.fsdp2 import FSDP2Engine
from support.rank_program import run_as_rank


def main(out: str) -> None:
    engine = FSDP2Engine(offload_to_cpu=True)
    task, plan = prepared(engine, 2)
    seen = []

    def note(*_) -> None:
        whole = [p.nbytes for p in task.parameters() if not isinstance(p, DTensor)]
        groups = [m._get_fsdp_state()._fsdp_param_group for m in (task.predictor, *task.predictor.blocks)]
        coming = [g._all_gather_result.all_gather_output.nbytes for g in groups if g._all_gather_result]
        seen.append(sum(whole) + sum(coming))

    for block in task.predictor.blocks:
        block.register_forward_pre_hook(note)
        block.register_forward_hook(lambda _, args, out: out.register_hook(note) and None)
    compute = lambda: Loss(task.predictor(torch.ones(1, 8)).sum(), 1.0)  # noqa: E731
    engine.micro_step(compute, last=True, scale=1.0)
    if dist.get_rank() == 0:
        Path(out).write_text(f"{plan.gathered_bytes} {max(seen)}")


if __name__ == "__main__":
    run_as_rank(main)
