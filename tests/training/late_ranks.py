"""Run by each rank: a tiny run with planted faults, whose norms the host reads at once or late.

usage: late_ranks.py CONFIG OUT
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.training.assembly import assemble
from mm_core.training.late import late_steps
from mm_core.training.loop import run_steps
from mm_core.training.run import running
from support.rank_program import run_as_rank

STEPS, PLANTS = 70, 50


class Broken(torch.autograd.Function):
    """A finite loss whose gradient is infinite."""

    @staticmethod
    def forward(ctx, total):
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def plants_of(world: int) -> dict[int, tuple[int, str]]:
    """Step -> the rank at fault and the kind of fault, seeded."""
    drawn = random.Random(47)
    return {
        step: (drawn.randrange(world), drawn.choice(["loss", "gradient"]))
        for step in drawn.sample(range(STEPS), PLANTS)
    }


def train(config: Path, folder: Path, late: bool, plants: dict[int, tuple[int, str]], policy: str) -> dict:
    rank = dist.get_rank()
    overrides = [f"run.dir={folder}", f"train.steps={STEPS}", "data.loader.workers=0", "ema={decay: 0.9}"]
    overrides += ["train.micro_batch_size=1", "train.global_batch_size=4"]
    overrides += [f"train.non_finite={{policy: {policy}, in_a_row: 1000, in_all: 1000}}", "log.every=1"]
    run = assemble(load_config(config, [*overrides, "checkpoint.every=40"]), "never")
    task, engine = run.task, run.engine
    engine.late, loss_of, update = late, task.loss, engine.update
    run.late = late_steps(run)
    found: dict = {"notes": [], "moved": [], "fault": "", "updates": 0}
    note = run.reporter.progress.note
    run.reporter.progress.note = lambda text: (found["notes"].append(text), note(text))

    def loss(inputs):
        found = loss_of(inputs)
        at, kind = plants.get(task._step, (None, ""))
        if at != rank:
            return found
        return replace(
            found, total=Broken.apply(found.total) if kind == "gradient" else found.total * torch.nan
        )

    def weights() -> list[torch.Tensor]:
        return [shard.master.clone() for shard in engine.shards()]

    def watched(clip):
        before = weights()
        norm = update(clip)
        found["updates"] += 1
        same = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
        found["moved"] += [] if same else [task._step]
        return norm

    task.loss, engine.update = loss, watched
    try:
        with running(run):
            run_steps(run, run.start)
    except MMError as fault:
        found["fault"] = str(fault)
    state = engine.state_dict()
    found["state"] = {f"{part}.{name}": t for part, own in state.items() for name, t in own.items()}
    found["state"] |= {f"ema.{name}": t for name, t in run.between.ema.state_dict().items()}
    found["state"] = {name: getattr(t, "_local_tensor", t).clone() for name, t in found["state"].items()}
    found["weights"] = weights()
    found["skipped"] = [
        int(n) for text in found["notes"] for n in re.findall(r"^step (\d+) was skipped", text)
    ]
    return found


def main(config: str, out: str) -> None:
    folder, plants = Path(out), plants_of(dist.get_world_size())
    first = min(step for step in range(3, STEPS) if step not in plants)
    found = {
        "now": train(Path(config), folder / "now", False, plants, "skip"),
        "late": train(Path(config), folder / "late", True, plants, "skip"),
        "stopped now": train(Path(config), folder / "a", False, {first: (1, "loss")}, "stop"),
        "stopped late": train(Path(config), folder / "b", True, {first: (1, "loss")}, "stop"),
    }
    torch.save(found | {"first": first}, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    run_as_rank(main)
