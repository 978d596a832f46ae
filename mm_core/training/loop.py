"""The training loop: the order of operations in a step.

The Task defines what is computed, and the Engine how it is distributed over devices: contracts that plugins
implement. The loop also uses the data, the gradient guard, the reporter and the work between steps: see
`Training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from mm_core.contracts import (
    Batch,
    Engine,
    Loss,
    LRSchedule,
    Randomness,
    SupportsBeginStep,
    SupportsOverflowed,
    Task,
)
from mm_core.contracts.bases.task_module import loss_of
from mm_core.data.loading.cut_captions import CutCaptions
from mm_core.errors import CheckpointError, MMError, PeerError, TrainingError
from mm_core.plan import RunPlan
from mm_core.runtime.ranks import gather_rows
from mm_core.training.forecast.in_run import NOTHING, Foreseen
from mm_core.training.step import IssuedStep, StepAgreement, end_step

if TYPE_CHECKING:
    from mm_core.telemetry.reporter import RunReporter
    from mm_core.training.between_steps import BetweenSteps
    from mm_core.training.guard import UpdateGuard


@dataclass
class Training:
    """The parts of a training run that the loop uses.

    Attributes:
        plan: the number of steps, and of micro-batches per step.
        task: computes a loss from a batch.
        engine: holds the weights; computes backward, gradient norm and update.
        batches: this rank's micro-batches, in order.
        lr_schedule: the learning rate of each step.
        rng: the run's randomness, from which every draw is derived.
        guard: skips steps whose gradients are not finite or far too large.
        reporter: measures, logs and shows. Losses stay on the device until it needs them.
        between: the work between steps: average, callbacks, evaluation, checkpoints, profile, watchdog, and
            whether to stop.
        clip_grad_norm: L2 norm to which gradients are clipped; None without clipping.
        start: steps already taken when the run was assembled.
        late: ends a step on a device that decides about updates itself, and returns whether the run ends
            (`LateSteps`); None: steps end as below.
        cut: counts the captions that are cut.
        foreseen: what was known of the run before it started.
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
    start: int
    late: Callable[[IssuedStep, Sequence[Loss]], bool] | None = None
    cut: CutCaptions = field(default_factory=CutCaptions)
    foreseen: Foreseen = NOTHING


def run_steps(training: Training, start: int) -> int:
    """Runs the training loop from step `start` to the plan's end; returns the number of steps taken."""
    plan, engine, reporter = training.plan, training.engine, training.reporter
    for step in range(start, plan.steps):
        training.between.step_begins(step)
        if isinstance(training.task, SupportsBeginStep):
            training.task.begin_step(step)
        reporter.enter("data")
        began = perf_counter()
        batches, weights, fault = read_step(training)
        wait = perf_counter() - began
        reporter.enter("wait")
        agreed = agree(training, batches, weights, fault)
        lr = engine.scale_lr(training.lr_schedule.factor(step))
        scale = engine.data_ranks.count / agreed.weight  # the engine averages over the shares of the data
        forwards = [partial(compute, training, step, index, batch) for index, batch in enumerate(batches)]
        losses = [engine.micro_step(f, last=f is forwards[-1], scale=scale) for f in forwards]
        issued = IssuedStep(step, lr, wait, agreed, batches, forwards, scale)
        if training.late is not None:
            ends = training.late(issued, losses)
        else:
            grad_norm = engine.grad_norm()
            reporter.enter("optimizer")
            refused = overflow(engine, grad_norm)
            refused = refused or training.guard.judge(step, grad_norm, losses, batches, forwards)
            if refused is None:
                engine.step(grad_norm, training.clip_grad_norm)
            else:
                engine.discard()
            ends = end_step(training, issued, losses, grad_norm, refused)
        if ends:
            return step + 1
    return max(start, plan.steps)


def read_step(training: Training) -> tuple[list[Batch], list[float], MMError | None]:
    """Reads this rank's micro-batches of one training step; returns them, their weights and any error.

    An error is returned, not raised, so that `agree` can pass it to all ranks.
    """
    try:
        batches = [next(training.batches) for _ in range(training.plan.accumulation)]
        return batches, [float(training.task.weight(batch)) for batch in batches], training.between.fault()
    except MMError as fault:
        return [], [], fault


def compute(training: Training, step: int, index: int, batch: Batch) -> Loss:
    """Computes the loss of a step's micro-batch on the device: encodes without gradients, then forward."""
    seed_model(training, step, index)
    training.reporter.enter("encode")
    on_device = batch.to(training.engine.device, non_blocking=True)
    with torch.no_grad():
        inputs = training.task.prepare(on_device, training.rng)
    training.reporter.enter("forward_backward")
    with training.reporter.counting():
        return loss_of(training.task, inputs)


def overflow(engine: Engine, grad_norm: float) -> str | None:
    """The reason to skip a step whose gradients overflow at the engine's loss scale; None for others."""
    return engine.overflowed() if not isfinite(grad_norm) and isinstance(engine, SupportsOverflowed) else None


def seed_model(training: Training, step: int, index: int) -> None:
    """Seeds dropout in the model for a micro-batch, from the run's seed, the step and the micro-batch."""
    micro = index * training.engine.data_ranks.count + training.engine.data_ranks.rank
    torch.manual_seed(training.rng.seed32("model", step, micro))


def agree(
    training: Training, batches: Sequence[Batch], weights: Sequence[float], fault: MMError | None
) -> StepAgreement:
    """Exchanges weights, stop and save requests and errors of a training step among all ranks.

    The only CPU collective (gloo) of a step. An error on any rank ends all of them, after they have saved
    (see `BetweenSteps.close`).

    Args:
        training: the run's parts.
        batches: this rank's micro-batches.
        weights: their weights.
        fault: this rank's error, or None.
    """
    samples = sum(float((batch.sample_weights > 0).sum()) for batch in batches)
    stop, save = training.between.stop, training.between.save_due
    bad = 0.0 if fault is None else 2.0 if isinstance(fault, CheckpointError) else 1.0
    counts = training.engine.data_ranks.leads  # samples that several ranks compute count once
    rows = gather_rows([sum(weights) * counts, samples * counts, float(stop), float(save), bad])
    culprits = rows[:, 4].nonzero().flatten().tolist()
    if culprits:
        raised = fault or PeerError(f"rank {culprits[0]} failed to read its samples or to save a checkpoint")
        raised.on_all_ranks = float(rows[:, 4].max()) < 2  # the steps taken can be saved unless saving failed
        raise raised
    total = float(rows[:, 0].sum())
    if total <= 0:
        raise TrainingError(
            "every sample in this step has weight 0",
            hint="give at least one sample a weight above 0, in the dataset or the task",
        )
    # The clocks of the ranks differ: rank 0's clock decides when to save.
    return StepAgreement(total, float(rows[:, 1].sum()), bool(rows[:, 2].any()), bool(rows[0, 3]))
