"""Run by each rank: trains the tasks of authors, who have written no more than a loss.

usage: task_ranks.py OUT (pairs | clip) ACCUMULATED: rank 0 writes the losses of three steps and the weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mm_core.contracts import DatasetBase, DictBatch, Loss, Randomness, SampleKey, TaskInputs, TaskModule
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.adamw import adamw
from mm_core.parallel import gather_samples
from support.rank_program import run_as_rank
from support.tensors import all_whole

ROWS = 8
WEIGHTS = (1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 1.5, 0.25)
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Rows(DatasetBase):
    """Pairs of related vectors."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict:
        x = Randomness(5).normal((5,), "x", index)
        return {"x": x, "y": x[:3] + 0.1, "name": f"row {index}", "number": index}


class Pairs(TaskModule):
    """One loss a sample, with noise; a module that is not trained stands before the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(5, 5).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.distance = nn.MSELoss(reduction="none")

    def losses(self, batch, rng):
        noise = torch.stack([rng.normal((5,), "noise", *key) for key in batch.keys])
        return self.distance(self.net(self.mixed(batch["x"]) + 0.1 * noise), batch["y"]).mean(1)


class Towers(nn.Module):
    """Two towers and the temperature between them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(3, 4)
        self.logit_scale = nn.Parameter(torch.empty(()))

    def init_weights(self) -> None:
        self.left.reset_parameters()
        self.right.reset_parameters()
        nn.init.constant_(self.logit_scale, 1.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, right = (nn.functional.normalize(tower, dim=1) for tower in (self.left(x), self.right(y)))
        return left, right, self.logit_scale.exp()


class Contrastive(TaskModule):
    """Each sample against those of all ranks, in both directions (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def loss(self, inputs: TaskInputs) -> Loss:
        batch = inputs.batch
        left, right, scale = self.towers(batch["x"], batch["y"])
        counts = gather_samples(batch.sample_weights) > 0
        own = dist.get_rank() * len(batch) + torch.arange(len(batch))
        total = torch.zeros(())
        for one, others in ((left, right), (right, left)):
            logits = scale * one @ gather_samples(others).T
            logits = logits.masked_fill(~counts & (own[:, None] != torch.arange(len(counts))), -torch.inf)
            total = total + nn.functional.cross_entropy(logits, own, reduction="none") @ batch.sample_weights
        return Loss(total / 2, self.weight(batch))


def batch_of(rows: list[int], epoch: int) -> DictBatch:
    dataset = Rows()
    samples = [{**dataset[row], "key": SampleKey(epoch, row), "weight": WEIGHTS[row]} for row in rows]
    return dataset.collate(samples)


def main(out: str, kind: str, accumulated: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        task = {"pairs": Pairs, "clip": Contrastive}[kind]()
    engine = FSDP2Engine()

    def optimizer(parameters):
        return adamw([{"params": [*parameters.values()], "names": [*parameters]}], **OPTIONS)

    engine.prepare(task, engine.plan(task, world, 2), optimizer, Randomness(0))
    rng, losses = Randomness(3), []
    mine = torch.arange(ROWS).chunk(world)[rank]
    for step in range(3):
        total = 0.0
        for number, rows in enumerate(mine.chunk(int(accumulated))):
            batch = batch_of(rows.tolist(), step)

            def compute(batch=batch) -> Loss:
                return task.loss(task.prepare(batch, rng))

            last = number == int(accumulated) - 1
            found = engine.micro_step(compute, last=last, scale=world / sum(WEIGHTS))
            assert found.weight == task.weight(batch)
            total += float(found.total)
        engine.step(engine.grad_norm(), None)
        everyone = torch.tensor(total)
        dist.all_reduce(everyone)
        losses.append(float(everyone) / sum(WEIGHTS))
    with engine.evaluating():
        held_out = task.evaluate(batch_of(mine.tolist(), 0), rng, ())
    sums = torch.stack([held_out.sums["loss"].sum(), held_out.weights.sum()])
    dist.all_reduce(sums)
    state = all_whole(engine.state_dict()["model"])
    if rank == 0:
        torch.save({"losses": losses, "state": state, "held out": float(sums[0] / sums[1])}, out)


if __name__ == "__main__":
    run_as_rank(main)
