"""Run by each rank: loss and gradients of two packed rows of conversations, as a step of the engine.

usage: packed_ranks.py OUT CONFIG checked|unchecked|planted
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

import mm_core
from mm_core.contracts import Randomness
from mm_core.errors import ContractError
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plan import build_task
from mm_core.tasks.pretrained import task as task_module
from mm_core.tasks.pretrained.own_positions import PackedInputs
from support.packed_chats import batch_of
from support.rank_program import run_as_rank
from support.tensors import whole

ROWS = 2


def main(out: str, path: str, mode: str) -> None:
    config, world, rank = mm_core.load_config(path), dist.get_world_size(), dist.get_rank()
    task = build_task(config)
    if mode == "unchecked":
        task_module.check_packing = lambda *given: None
    if mode == "planted" and rank == world - 1:  # the others learn of it
        task._labels = replace(task._labels, packed=PackedInputs())
    engine = config.registry.build("engine", config.engine)
    plan = engine.plan(task, world, 1)

    def optimizer(parameters):
        return torch.optim.SGD(parameters.values(), lr=0.1)

    sources = WeightSources(task, config.init_from, config.registry)
    engine.prepare(task, plan, optimizer, Randomness(7), FileWeights(sources, config.train.adapters))
    data = config.registry.build("dataset", config.data.train)
    batches = [task.batch_transform()(batch_of(data, [data[row]])) for row in range(rank, ROWS, world)]
    table = torch.tensor([sum(task.weight(batch) for batch in batches)])
    dist.all_reduce(table)
    total = torch.zeros(())
    try:
        for index, batch in enumerate(batches):
            compute = partial(lambda held: task.loss(task.prepare(held, Randomness(1))), batch)
            last = index == len(batches) - 1
            total += engine.micro_step(compute, last=last, scale=world / float(table)).total
    except ContractError as fault:
        print("refused:", fault)
        return
    dist.all_reduce(total)
    gradients = {name: whole(p.grad) for name, p in engine.named_parameters() if p.grad is not None}
    if rank == 0:
        torch.save({"loss": float(total) / float(table), "gradients": gradients}, out)


if __name__ == "__main__":
    run_as_rank(main)
