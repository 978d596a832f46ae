"""Run by each rank: one step's loss and gradients of configs, over micro-batches of uneven rows.

usage: pretrained_ranks.py OUT CONFIG ...
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import mm_core
from mm_core.config.sections import RunConfig
from mm_core.contracts import Randomness
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plan import build_task
from support.pretrained_models import ROWS, batch_of
from support.rank_program import run_as_rank
from support.tensors import whole

MICRO = 2


def one_step(config: RunConfig) -> dict[str, object]:
    """Loss and gradients of the mean over the global batch, and an evaluation of it."""
    task = build_task(config)
    engine = config.registry.build("engine", config.engine)
    plan = engine.plan(task, dist.get_world_size(), 2)

    def optimizer(parameters):
        return torch.optim.SGD(parameters.values(), lr=0.1)

    engine.prepare(
        task,
        plan,
        optimizer,
        Randomness(7),
        FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters),
    )
    dataset = config.registry.build("dataset", config.data.train)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [range(first, first + MICRO) for first in range(rank * MICRO, ROWS, MICRO * world)]
    batches = [task.batch_transform()(batch_of(dataset, rows)) for rows in mine]
    table = torch.tensor([sum(task.weight(batch) for batch in batches)])
    dist.all_reduce(table)
    scale = world / float(table)
    total = torch.zeros(())
    for index, batch in enumerate(batches):
        compute = partial(lambda held: task.loss(task.prepare(held, Randomness(1))), batch)
        loss = engine.micro_step(compute, last=index == len(batches) - 1, scale=scale)
        assert loss.weight == task.weight(batch)
        total += loss.total
    dist.all_reduce(total)
    gradients = {name: whole(p.grad) for name, p in engine.named_parameters() if p.grad is not None}
    with engine.evaluating():
        found = [task.evaluate(batch, Randomness(1), (0.5,)) for batch in batches]
    rows = torch.zeros(2, ROWS)
    for numbers, evaluation in zip(mine, found, strict=True):
        rows[0, list(numbers)], rows[1, list(numbers)] = evaluation.sums["loss"], evaluation.weights
    dist.all_reduce(rows)
    return {
        "loss": float(total) / float(table),
        "gradients": gradients,
        "rows": rows,
        "wrapped": plan.wrapped,
    }


def main(out: str, *configs: str) -> None:
    found = {Path(path).stem: one_step(mm_core.load_config(path)) for path in configs}
    if dist.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    run_as_rank(main)
