"""The training loop. It knows a Task (what to compute) and an Engine (how it is spread), nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist

from mm_core.contracts import Batch, Engine, Loss, LRSchedule, Randomness, Stepped, Task
from mm_core.errors import CheckpointError, MMError, PeerError, TrainingError
from mm_core.plan import RunPlan


class Reporter(Protocol):
    """What the loop tells while it runs. Losses stay on the device until the reporter asks for them."""

    def enter(self, phase: str) -> None: ...

    def counting(self) -> AbstractContextManager[None]: ...

    def micro(self, loss: Loss) -> None: ...

    def step(
        self, step: int, *, lr: float, grad_norm: float, data_wait: float, samples: float
    ) -> Mapping[str, float] | None: ...


class Guard(Protocol):
    """Judges a step's gradients before the update: None to take it, a sentence to leave the step out.
    Raises, on all ranks, to end the run."""

    def judge(
        self,
        step: int,
        norm: float,
        losses: Sequence[Loss],
        batches: Sequence[Batch],
        rerun: Callable[[], Iterator[Loss]],
    ) -> str | None: ...


class Milestones(Protocol):
    """What happens between steps: weights averaged, results watched, validated, sampled and saved."""

    def begin(self, step: int) -> None:
        """Step `step` (from 0) begins."""

    def fault(self) -> MMError | None:
        """What has failed in the background since the last step."""

    @property
    def stop(self) -> bool:
        """Whether this rank was asked to save and end."""

    @property
    def save_due(self) -> bool:
        """Whether it is time to save by the clock of this rank."""

    def updated(self, step: int, refused: str | None) -> None:
        """Step number `step` (from 1) has changed the weights or, `refused`, was left out."""

    def reach(self, step: int, logged: Mapping[str, float] | None, *, stop: bool, save: bool) -> bool:
        """Does what is due after `step` steps; whether the run ends here."""


@dataclass
class Training:
    """The parts of a run, ready to step."""

    plan: RunPlan
    task: Task
    engine: Engine
    batches: Iterator[Batch]
    lr_schedule: LRSchedule
    rng: Randomness
    guard: Guard
    report: Reporter
    milestones: Milestones
    clip_grad_norm: float | None


@dataclass(frozen=True)
class Agreement:
    """What all ranks say of one step: its weight and samples, whether to stop or save."""

    weight: float
    samples: float
    stop: bool
    save: bool


def run_steps(training: Training, start: int) -> int:
    """Steps from `start` (steps already taken) to the plan's end; returns the steps taken in all."""
    plan, engine, report = training.plan, training.engine, training.report
    for step in range(start, plan.steps):
        training.milestones.begin(step)
        if isinstance(training.task, Stepped):
            training.task.begin_step(step)
        report.enter("data")
        began = perf_counter()
        batches, weights, fault = read_step(training)
        data_wait = perf_counter() - began
        report.enter("wait")
        agreed = agree(training, batches, weights, fault)
        lr = engine.scale_lr(training.lr_schedule.factor(step))
        scale = plan.engine.data_parallel / agreed.weight  # the engine averages over ranks
        losses: list[Loss] = []
        for index, batch in enumerate(batches):
            seed_model(training, step, index)
            last = index == len(batches) - 1
            losses.append(engine.micro_step(partial(compute, training, batch), last=last, scale=scale))
            report.micro(losses[-1])
        grad_norm = engine.grad_norm()
        report.enter("optimizer")
        rerun = partial(recompute, training, step, batches)
        refused = training.guard.judge(step, grad_norm, losses, batches, rerun)
        if refused is None:
            engine.step(grad_norm, training.clip_grad_norm)
        else:
            engine.discard()
        training.milestones.updated(step + 1, refused)
        report.enter("log")
        logged = report.step(
            step + 1, lr=lr, grad_norm=grad_norm, data_wait=data_wait, samples=agreed.samples
        )
        if training.milestones.reach(step + 1, logged, stop=agreed.stop, save=agreed.save):
            return step + 1
    return max(start, plan.steps)


def read_step(training: Training) -> tuple[list[Batch], list[float], MMError | None]:
    """This rank's micro-batches of one step and their weights; a fault is returned, so that all
    ranks hear of it in the agreement that follows."""
    try:
        batches = [next(training.batches) for _ in range(training.plan.accumulation)]
        return batches, [training.task.weight(batch) for batch in batches], training.milestones.fault()
    except MMError as fault:
        return [], [], fault


def compute(training: Training, batch: Batch) -> Loss:
    """One micro-batch on the device: encode and draw noise without gradients, then the loss."""
    with training.report.counting():
        training.report.enter("encode")
        on_device = batch.to(training.engine.device, non_blocking=True)
        with torch.no_grad():
            inputs = training.task.prepare(on_device, training.rng)
        training.report.enter("forward_backward")
        return training.task.loss(inputs)


def recompute(training: Training, step: int, batches: Sequence[Batch]) -> Iterator[Loss]:
    """The losses of a step once more, with their graphs: to find where one stopped being finite."""
    for index, batch in enumerate(batches):
        seed_model(training, step, index)
        yield compute(training, batch)


def seed_model(training: Training, step: int, index: int) -> None:
    """Dropout inside the model follows (seed, step, micro-batch of the global batch)."""
    micro = index * training.plan.engine.data_parallel + dist.get_rank()
    torch.manual_seed(training.rng.seed32("model", step, micro))


def agree(
    training: Training, batches: Sequence[Batch], weights: Sequence[float], fault: MMError | None
) -> Agreement:
    """The one small CPU collective of a step (gloo). A fault on any rank ends all of them, once they have
    saved (see `RunMilestones.close`)."""
    samples = sum(float((batch.weights > 0).sum()) for batch in batches)
    stop, save = training.milestones.stop, training.milestones.save_due
    bad = 0.0 if fault is None else 2.0 if isinstance(fault, CheckpointError) else 1.0
    rows = gather([sum(weights), samples, float(stop), float(save), bad])
    culprits = rows[:, 4].nonzero().flatten().tolist()
    if culprits:
        raised = fault or PeerError(f"rank {culprits[0]} failed to read its samples or to save")
        raised.on_all_ranks = float(rows[:, 4].max()) < 2  # what was trained can be saved, if saving works
        raise raised
    total = float(rows[:, 0].sum())
    if total <= 0:
        raise TrainingError("the samples of this step weigh nothing together", hint="check the batch weights")
    # The clocks of the ranks differ: rank 0's decides when it is time to save.
    return Agreement(total, float(rows[:, 1].sum()), bool(rows[:, 2].any()), bool(rows[0, 3]))


def gather(row: Sequence[float]) -> torch.Tensor:
    """[ranks, len(row)] float64 on CPU: the row of every rank."""
    mine = torch.tensor(row, dtype=torch.float64)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return torch.stack(table)
