"""The training loop. It knows a Task (what to compute) and an Engine (how it is spread), nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mm_core.contracts import Batch, Engine, Loss, LRSchedule, Randomness, Task
from mm_core.errors import MMError, PeerError, TrainingError
from mm_core.plan import RunPlan


class StopRequest(Protocol):
    """Why to stop after this step (a signal), or None."""

    @property
    def requested(self) -> str | None: ...


class Reporter(Protocol):
    """What the loop tells while it runs. Losses stay on the device until the reporter asks for them."""

    def micro(self, loss: Loss) -> None: ...

    def step(self, step: int, *, lr: float, grad_norm: float, data_wait: float, samples: float) -> None: ...


@dataclass
class Training:
    """The parts of a run, ready to step."""

    plan: RunPlan
    task: Task
    engine: Engine
    batches: Iterator[Batch]
    lr_schedule: LRSchedule
    rng: Randomness
    report: Reporter
    save: Callable[[int], Any]
    stop: StopRequest
    clip_grad_norm: float | None
    save_every: int


@dataclass(frozen=True)
class Agreement:
    """What all ranks say of one step: its weight and samples, whether to stop, which ranks failed."""

    weight: float
    samples: float
    stop: bool
    failed: tuple[int, ...]


def run_steps(training: Training, start: int) -> int:
    """Steps from `start` (steps already taken) to the plan's end; returns the steps taken in all."""
    plan, engine, schedule = training.plan, training.engine, training.lr_schedule
    saved = start
    for step in range(start, plan.steps):
        began = time.perf_counter()
        batches, weights, fault = read_step(training)
        data_wait = time.perf_counter() - began
        agreed = agree(batches, weights, training.stop.requested is not None, fault is not None)
        if agreed.failed:
            raise fault or PeerError(f"rank {agreed.failed[0]} failed to read its samples")
        lr = engine.scale_lr(schedule.factor(step))
        scale = plan.engine.data_parallel / agreed.weight
        losses: list[Loss] = []
        for index, batch in enumerate(batches):
            seed_model(training, step, index)
            loss = engine.micro_step(
                lambda batch=batch: compute(training, batch),  # type: ignore[misc]
                last=index == len(batches) - 1,
                scale=scale,
            )
            training.report.micro(loss)
            losses.append(loss)
        grad_norm = take_update(training, step, batches, losses)
        training.report.step(
            step + 1, lr=lr, grad_norm=grad_norm, data_wait=data_wait, samples=agreed.samples
        )
        if agreed.stop or (step + 1) % training.save_every == 0 or step + 1 == plan.steps:
            training.save(step + 1)
            saved = step + 1
        if agreed.stop:
            return step + 1
    if saved == start == plan.steps == 0:
        training.save(0)  # a run of no steps still leaves its weights
    return max(start, plan.steps)


def read_step(training: Training) -> tuple[list[Batch], list[float], MMError | None]:
    """This rank's micro-batches of one step and their weights; a fault is returned, so that all
    ranks hear of it in the agreement that follows."""
    try:
        batches = [next(training.batches) for _ in range(training.plan.accumulation)]
        return batches, [training.task.weight(batch) for batch in batches], None
    except MMError as fault:
        return [], [], fault


def compute(training: Training, batch: Batch) -> Loss:
    """One micro-batch on the device: encode and draw noise without gradients, then the loss."""
    on_device = batch.to(training.engine.device, non_blocking=True)
    with torch.no_grad():
        inputs = training.task.prepare(on_device, training.rng)
    return training.task.loss(inputs)


def seed_model(training: Training, step: int, index: int) -> None:
    """Dropout inside the model follows (seed, step, micro-batch of the global batch)."""
    micro = index * training.plan.engine.data_parallel + dist.get_rank()
    torch.manual_seed(training.rng.seed32("model", step, micro))


def take_update(training: Training, step: int, batches: list[Batch], losses: list[Loss]) -> float:
    """Clips and updates. The norm is global, so all ranks refuse together; those speak whose own loss
    is to blame, and all where none is."""
    try:
        return training.engine.step(training.clip_grad_norm)
    except TrainingError as fault:
        guilty = [not math.isfinite(float(loss.total)) for loss in losses]
        samples = [name for batch, bad in zip(batches, guilty, strict=True) if bad for name in batch.ids]
        culprits = gather([float(any(guilty))])[:, 0].nonzero().flatten().tolist()
        if culprits and dist.get_rank() not in culprits:
            raise PeerError(f"the loss of rank {culprits[0]} is not finite") from None
        rank = f", rank {dist.get_rank()}, samples {samples[:8]}" if culprits else ""
        raise TrainingError(fault.what, where=f"step {step + 1}{rank}", hint=fault.hint) from None


def agree(batches: list[Batch], weights: list[float], stop: bool, failed: bool) -> Agreement:
    """The one small CPU collective of a step (gloo)."""
    samples = sum(float((batch.weights > 0).sum()) for batch in batches)
    rows = gather([sum(weights), samples, float(stop), float(failed)])
    culprits = tuple(int(rank) for rank in rows[:, 3].nonzero().flatten())
    total = float(rows[:, 0].sum())
    if not culprits and total <= 0:
        raise TrainingError("the samples of this step weigh nothing together", hint="check the batch weights")
    return Agreement(total, float(rows[:, 1].sum()), bool(rows[:, 2].any()), culprits)


def gather(row: list[float]) -> torch.Tensor:
    """[ranks, len(row)] float64 on CPU: the row of every rank."""
    mine = torch.tensor(row, dtype=torch.float64)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return torch.stack(table)
