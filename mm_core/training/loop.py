"""The training loop: what a step is, in the order in which it happens.

What is computed is the Task's, and how it is spread over devices the Engine's: contracts that plugins fulfil.
The loop also knows the data, the guard over gradients, the reporter, and what is due between steps: see
`Training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from mm_core.contracts import Batch, Engine, Loss, LRSchedule, Randomness, SupportsBeginStep, Task
from mm_core.errors import CheckpointError, MMError, PeerError, TrainingError
from mm_core.plan import RunPlan
from mm_core.runtime.ranks import Ranks, gather_rows

if TYPE_CHECKING:
    from mm_core.telemetry.reporter import RunReporter
    from mm_core.training.between_steps import BetweenSteps
    from mm_core.training.guard import UpdateGuard


@dataclass
class Training:
    """The parts of a run, ready to step.

    Attributes:
        plan: how many steps, and of how many micro-batches.
        task: turns a batch into a loss.
        engine: holds the weights; backward, gradient norm and update.
        batches: this rank's micro-batches, in their order.
        lr_schedule: the learning rate of a step.
        rng: of the run; every draw is derived from it.
        guard: leaves out steps whose gradients are not finite or far too large.
        reporter: measures, logs and shows. Losses stay on the device until it asks for them.
        between: what a run does beside its steps: average, callbacks, evaluation, checkpoints, profile,
            watchdog, and whether to stop.
        clip_grad_norm: L2 norm that gradients are clipped to.
    """

    plan: RunPlan
    task: Task
    engine: Engine
    batches: Iterator[Batch]
    lr_schedule: LRSchedule
    rng: Randomness
    guard: UpdateGuard
    reporter: RunReporter
    between: BetweenSteps
    clip_grad_norm: float | None


@dataclass(frozen=True)
class StepAgreement:
    """One step as all ranks see it: its weight and samples, and whether to stop or save after it."""

    weight: float
    samples: float
    stop: bool
    save: bool


def run_steps(training: Training, start: int) -> int:
    """Steps from `start` (steps already taken) to the plan's end; returns the steps taken in all."""
    plan, engine, reporter = training.plan, training.engine, training.reporter
    for step in range(start, plan.steps):
        training.between.step_begins(step)
        if isinstance(training.task, SupportsBeginStep):
            training.task.begin_step(step)
        reporter.enter("data")
        began = perf_counter()
        batches, weights, fault = read_step(training)
        data_wait = perf_counter() - began
        reporter.enter("wait")
        agreed = agree(training, batches, weights, fault)
        lr = engine.scale_lr(training.lr_schedule.factor(step))
        scale = plan.engine.data_parallel / agreed.weight  # the engine averages over ranks
        losses: list[Loss] = []
        for index, batch in enumerate(batches):
            seed_model(training, step, index)
            last = index == len(batches) - 1
            losses.append(engine.micro_step(partial(compute, training, batch), last=last, scale=scale))
            reporter.micro(losses[-1])
        grad_norm = engine.grad_norm()
        reporter.enter("optimizer")
        rerun = partial(recompute, training, step, batches)
        refused = training.guard.judge(step, grad_norm, losses, batches, rerun)
        if refused is None:
            engine.step(grad_norm, training.clip_grad_norm)
        else:
            engine.discard()
        training.between.updated(step + 1, refused)
        reporter.enter("log")
        logged = reporter.step(
            step + 1, lr=lr, grad_norm=grad_norm, data_wait=data_wait, samples=agreed.samples
        )
        if training.between.after_step(step + 1, logged, stop=agreed.stop, save=agreed.save):
            return step + 1
    return max(start, plan.steps)


def read_step(training: Training) -> tuple[list[Batch], list[float], MMError | None]:
    """This rank's micro-batches of one step and their weights; a fault is returned, so that all
    ranks learn of it in the agreement that follows."""
    try:
        batches = [next(training.batches) for _ in range(training.plan.accumulation)]
        return batches, [training.task.weight(batch) for batch in batches], training.between.fault()
    except MMError as fault:
        return [], [], fault


def compute(training: Training, batch: Batch) -> Loss:
    """One micro-batch on the device: encode and draw noise without gradients, then the loss."""
    with training.reporter.counting():
        training.reporter.enter("encode")
        on_device = batch.to(training.engine.device, non_blocking=True)
        with torch.no_grad():
            inputs = training.task.prepare(on_device, training.rng)
        training.reporter.enter("forward_backward")
        return training.task.loss(inputs)


def recompute(training: Training, step: int, batches: Sequence[Batch]) -> Iterator[Loss]:
    """The losses of a step once more, with their graphs: to find where one stopped being finite."""
    for index, batch in enumerate(batches):
        seed_model(training, step, index)
        yield compute(training, batch)


def seed_model(training: Training, step: int, index: int) -> None:
    """Dropout inside the model follows (seed, step, micro-batch of the global batch)."""
    micro = index * training.plan.engine.data_parallel + Ranks.current().rank
    torch.manual_seed(training.rng.seed32("model", step, micro))


def agree(
    training: Training, batches: Sequence[Batch], weights: Sequence[float], fault: MMError | None
) -> StepAgreement:
    """The one small CPU collective of a step (gloo). A fault on any rank ends all of them, once they have
    saved (see `BetweenSteps.close`)."""
    samples = sum(float((batch.sample_weights > 0).sum()) for batch in batches)
    stop, save = training.between.stop, training.between.save_due
    bad = 0.0 if fault is None else 2.0 if isinstance(fault, CheckpointError) else 1.0
    rows = gather_rows([sum(weights), samples, float(stop), float(save), bad])
    culprits = rows[:, 4].nonzero().flatten().tolist()
    if culprits:
        raised = fault or PeerError(f"rank {culprits[0]} failed to read its samples or to save")
        raised.on_all_ranks = float(rows[:, 4].max()) < 2  # what was trained can be saved, if saving works
        raise raised
    total = float(rows[:, 0].sum())
    if total <= 0:
        raise TrainingError("every sample in this step has weight 0", hint="check the batch weights")
    # The clocks of the ranks differ: rank 0's decides when it is time to save.
    return StepAgreement(total, float(rows[:, 1].sum()), bool(rows[:, 2].any()), bool(rows[0, 3]))
