"""Conformance checks of an engine's steps: they compute what a loop of plain torch computes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mm_core.contracts import Loss
from mm_core.errors import plural
from mm_core.testing.tensors import differing, names
from mm_core.testing.training.engines.probe import EngineProbe
from mm_core.testing.training.engines.task import LR, WEIGHTS, Plain, poisoned, sgd


def trains(probe: EngineProbe) -> None:
    """Two steps with AdamW give the losses and weights of a loop in plain torch."""
    trial, plain = probe.trained(), Plain()
    for step in range(2):
        found, wanted = trial.step(step), plain.step(step)
        probe.expect_number(f"the loss of step {step + 1}", found[0], wanted[0])
        probe.expect_weights(trial.weights(), plain.weights(), f"after step {step + 1}")


def micro_batches(probe: EngineProbe) -> None:
    """A step in four micro-batches is one in a single batch, and micro_step returns each loss as it was."""
    trial, plain = probe.trained(sgd), Plain(sgd)
    for step in range(2):
        trial.step(step, micros=4)
        plain.step(step)
    hint = "add up gradients over the micro-batches of a step, and clear them after the update"
    probe.expect_weights(trial.weights(), plain.weights(), "after two steps of four micro-batches", hint)

    def compute() -> Loss:
        return replace(trial.compute(2), metrics={"error": torch.ones(())})

    loss = trial.engine.micro_step(compute, last=True, scale=0.25)
    trial.engine.discard()
    probe.expect_number("the loss that micro_step returns", float(loss.total.detach()), plain.loss(2))
    kept = loss.weight == sum(WEIGHTS) and loss.metrics.keys() == {"error"}
    probe.expect(
        kept and not loss.total.requires_grad,
        "micro_step does not return the loss, detached, with its weight and metrics",
        hint="return dataclasses.replace(loss, total=loss.total.detach())",
    )


def gradient_norm(probe: EngineProbe) -> None:
    """grad_norm is the L2 norm of all gradients together, as torch computes it."""
    trial, plain = probe.trained(sgd), Plain(sgd)
    trial.backward(0, micros=2)
    probe.expect_number("grad_norm", trial.engine.grad_norm(), plain.step(0)[1])


def clipping(probe: EngineProbe) -> None:
    """step scales gradients to the largest norm if theirs is larger, and leaves smaller ones as they are."""
    for share, words in ((0.25, "a quarter of"), (4.0, "four times"), (None, "no limit instead of")):
        trial, plain = probe.trained(sgd), Plain(sgd)
        trial.engine.scale_lr(1.0)
        trial.backward(0)
        norm = trial.engine.grad_norm()
        clip = None if share is None else share * norm
        trial.engine.step(norm, clip)
        plain.step(0, clip=clip)
        when = f"after a step that clips at {words} the norm"
        probe.expect_weights(trial.weights(), plain.weights(), when)


def learning_rates(probe: EngineProbe) -> None:
    """scale_lr sets each group's rate to its base rate, with its lr_scale, times the factor."""
    trial, plain = probe.trained(sgd), Plain(sgd)
    probe.expect_number("base_lr", trial.engine.base_lr, LR)
    probe.expect_number("what scale_lr(0.5) returns", trial.engine.scale_lr(0.5), 0.5 * LR)
    for step, factor in enumerate((0.5, 0.0, 1.0)):
        trial.step(step, factor=factor)
        plain.step(step, factor)
        when = f"after scale_lr({factor:g}) and a step"
        hint = "keep the base rates of the groups, and multiply each by the group's lr_scale"
        probe.expect_weights(trial.weights(), plain.weights(), when, hint)


def skipped_steps(probe: EngineProbe) -> None:
    """A loss that is not finite makes the norm so, and a discarded step leaves no trace."""
    for at in (0, 1):
        trial, plain = probe.trained(), Plain()
        trial.step(0)
        plain.step(0)
        before = trial.weights()
        trial.backward(1, micros=2, change=poisoned(at))
        norm = trial.engine.grad_norm()
        probe.expect(
            not math.isfinite(norm),
            f"the loss of micro-batch {at + 1} of 2 is NaN, but grad_norm is {norm:.4g}",
            hint="a NaN may leave the gradients finite: start the backward of such a loss from NaN",
        )
        trial.engine.discard()
        moved = differing(before, trial.weights())
        probe.expect(not moved, f"discard changes {names(moved)}", accepted="cleared gradients alone")
        trial.step(2)
        plain.step(2)
        hint = "clear the gradients in discard, and take no step of the optimizer"
        probe.expect_weights(trial.weights(), plain.weights(), "in the step after a discarded one", hint)


def evaluation(probe: EngineProbe) -> None:
    """evaluating() is evaluation mode without gradients, restores the modes, and sees the newest weights."""
    trial, plain = probe.trained(), Plain()
    task = trial.task
    task.net.blocks[0].eval()
    before = [module.training for module in task.modules()]
    for step in range(2):  # evaluated before and after an update
        with trial.engine.evaluating():
            modes, grad = {module.training for module in task.net.modules()}, torch.is_grad_enabled()
            own = task.training
            loss = float(trial.compute(5).total)
        probe.expect(
            modes == {False} and not grad,
            "within evaluating() modules are in training mode, or gradients are computed",
        )
        probe.expect(
            not own,
            "within evaluating() the task itself is in training mode",
            hint="put the task that `prepare` gets into evaluation mode, not only its trained components",
        )
        probe.expect(
            before == [module.training for module in task.modules()] and torch.is_grad_enabled(),
            "after evaluating() modules are in other modes than before, or gradients stay off",
        )
        probe.expect_number(f"the loss in an evaluation after {plural(step, 'step')}", loss, plain.loss(5))
        trial.step(step)
        plain.step(step)


def untrained(probe: EngineProbe) -> None:
    """Without an optimizer, the engine prepares a task that is evaluated only."""
    trial = probe.trained(None)
    probe.expect_number("the loss in an evaluation without training", trial.loss(0), Plain().loss(0))
