"""What the loop knows of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_core.contracts import Batch, Loss

if TYPE_CHECKING:
    from mm_core.training.loop import Training


@dataclass(frozen=True)
class StepAgreement:
    """The values of a training step on which all ranks agree.

    Attributes:
        weight: total weight of the batch over all ranks.
        samples: number of samples over all ranks.
        stop: whether to stop after the step.
        save: whether to save after the step.
    """

    weight: float
    samples: float
    stop: bool
    save: bool


@dataclass(frozen=True)
class IssuedStep:
    """A step whose gradients the device computes.

    Attributes:
        step: from 0.
        lr: its learning rate.
        data_wait: seconds that this rank waited for its samples.
        agreed: on what the ranks agreed.
        batches: this rank's micro-batches.
        forwards: of the micro-batches.
        scale: of their losses.
    """

    step: int
    lr: float
    data_wait: float
    agreed: StepAgreement
    batches: Sequence[Batch]
    forwards: Sequence[Callable[[], Loss]]
    scale: float


def end_step(
    training: Training, issued: IssuedStep, losses: Sequence[Loss], grad_norm: float, refused: str | None
) -> bool:
    """Reports a step that updated, or that was `refused`, and works between steps; whether the run ends."""
    step, agreed, reporter = issued.step + 1, issued.agreed, training.reporter
    for loss in losses:
        reporter.micro(loss)
    training.between.updated(step, refused)
    reporter.enter("log")
    logged = reporter.step(
        step,
        lr=issued.lr,
        grad_norm=grad_norm,
        data_wait=issued.data_wait,
        samples=agreed.samples,
        weight=agreed.weight,
    )
    return training.between.after_step(step, logged, stop=agreed.stop, save=agreed.save)
