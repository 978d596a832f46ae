"""The conformance kit of engines (`mm_core.contracts.Engine`).

An engine is driven by its contract alone, and compared with a loop of plain torch over the same task.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import wraps

import torch
from torch import Tensor

from mm_core.contracts import EnginePlan, Loss
from mm_core.runtime.process_group import process_group
from mm_core.testing.kit import Check, Kit, NotApplicable, Probe, by_name
from mm_core.testing.training.engine_ranks import EngineProbe, sharded_checkpoint, sharded_training
from mm_core.testing.training.engine_task import (
    FROZEN,
    LR,
    SCALE,
    WEIGHTS,
    MakeOptimizer,
    Net,
    Plain,
    TinyTask,
    Trial,
    adamw,
    drawn_values,
    network_values,
    poisoned,
    sgd,
    task_on_meta,
    whole,
)

_CLOSE = 1e-5
"""Relative to the largest element of a tensor."""


def _in_group(check: Check) -> Check:
    """The check within a process group of this process, which an engine needs."""

    @wraps(check)
    def grouped(probe: Probe) -> None:
        with process_group():
            on_cpu = probe.build().device.type == "cpu"
            if on_cpu and probe.registered.component.capabilities.get("cpu", True) is False:
                raise NotApplicable("the engine declares that it needs an accelerator (`cpu: False`)")
            check(probe)

    return grouped


def _trained(probe: Probe, make: MakeOptimizer | None = adamw) -> Trial:
    """The task in a new engine of the probe, with the weights that `Plain` begins with."""
    return Trial(probe.build(), make, network_values())


def _off(found: Tensor, wanted: Tensor) -> bool:
    return not torch.allclose(found, wanted, rtol=0, atol=_CLOSE * float(wanted.abs().max()) + 1e-8)


def _expect_weights(
    probe: Probe,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    when: str,
    hint: str | None = None,
) -> None:
    """Expects the trained parameters of plain torch."""
    other = found.keys() ^ wanted.keys()
    probe.expect(
        not other,
        f"named_parameters has other trained parameters than the task: {_names(other)}",
        accepted="each trained parameter once, by its path in the task",
    )
    wrong = [name for name, tensor in wanted.items() if _off(found[name], tensor)]
    largest = max((float((found[n] - wanted[n]).abs().max()) for n in wrong), default=0.0)
    probe.expect(
        not wrong,
        f"{when}, {_names(wrong)} differs by {largest:.1e} from plain torch",
        accepted=f"a relative difference of at most {_CLOSE:g}",
        hint=hint,
    )


def _expect_number(probe: Probe, what: str, found: float, wanted: float) -> None:
    probe.expect(
        isinstance(found, float) and math.isclose(found, wanted, rel_tol=_CLOSE),
        f"{what} is {found!r}, but {wanted:.7g} in plain torch",
        accepted=f"a float, with a relative difference of at most {_CLOSE:g}",
    )


def _names(names: Collection[str]) -> str:
    chosen = sorted(names)
    return ", ".join(chosen[:4]) + (", ..." if len(chosen) > 4 else "")


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit, or that only one of the two has."""
    return [
        n for n in one.keys() | other.keys() if n not in one or n not in other or _unlike(one[n], other[n])
    ]


def _unlike(one: Tensor, other: Tensor) -> bool:
    return one.dtype != other.dtype or not torch.equal(one, other)


@_in_group
def plans(probe: Probe) -> None:
    """A plan leaves the task on meta, names modules that exist, and its bytes are those of the tensors."""
    engine, task = probe.build(), task_on_meta()
    one, two = (engine.plan(task, world, 2.0) for world in (1, 2))
    moved = [name for name, tensor in task.state_dict().items() if not tensor.is_meta]
    probe.expect(
        not moved and type(task.net) is Net,
        f"plan changes the task: {_names(moved) or 'its modules'}",
        accepted="a task that stays on meta: `mm-train --dry-run` plans without a device",
    )
    paths = {name for name, _ in task.named_modules()}
    for world, plan in ((1, one), (2, two)):
        probe.expect(
            plan.world == world
            and world % plan.data_parallel == 0
            and math.prod(plan.mesh.values()) == world,
            f"the plan of {world} ranks has world {plan.world}, data_parallel {plan.data_parallel} and the"
            f" mesh {dict(plan.mesh)}",
            accepted="world as given, data_parallel that divides it, and a mesh of that many ranks",
        )
        named = (
            *plan.wrapped,
            *plan.recomputed,
            *plan.ignored,
            *plan.forward_prefetch,
            *plan.backward_prefetch,
        )
        unknown = set(named) - paths
        probe.expect(not unknown, f"the plan names modules that the task has not: {_names(unknown)}")
    _expect_bytes(probe, task, one, two, engine.plan(task, 1, 4.0))


def _expect_bytes(probe: Probe, task: TinyTask, one: EnginePlan, two: EnginePlan, more: EnginePlan) -> None:
    """Expects the bytes of plans for one rank, for two, and for one with two more tensors of state."""
    own = sum(p.nbytes for p in task.net.parameters())
    trained = sum(p.nbytes for p in task.net.parameters() if p.requires_grad)
    for what, found, tensors in (
        ("parameter_bytes", one.parameter_bytes, own),
        ("gradient_bytes", one.gradient_bytes, trained),
        (
            "optimizer_bytes for two more tensors of state",
            more.optimizer_bytes - one.optimizer_bytes,
            2 * trained,
        ),
        ("the bytes of frozen", sum(f.device_bytes + f.host_bytes for f in one.frozen), 4 * 5 * (4 + 1)),
    ):
        probe.expect(  # in other dtypes, and with copies in fp32
            0.5 * tensors <= found <= 4 * tensors,
            f"on one rank, {what} is {found:,}, but the tensors have {tensors:,} bytes",
            accepted="bytes, of all tensors that a rank holds",
        )
    for what in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        whole_bytes, share = asdict(one)[what], asdict(two)[what]
        probe.expect(
            0.5 * whole_bytes <= share <= whole_bytes,
            f"{what} is {share:,} on two ranks, and {whole_bytes:,} on one",
            accepted="the largest share of any rank: between the half and all",
        )


@_in_group
def initialises(probe: Probe) -> None:
    """Without initial weights, every parameter and buffer is set by the modules and by the seed alone."""
    one, again, other = (Trial(probe.build(), seed=seed) for seed in (0, 0, 1))
    state = whole(one.engine.state_dict()["model"].items())
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    probe.expect(not bad, f"{_names(bad)} is not finite after prepare", hint="call the modules' init_weights")
    wanted = {"net.scale": torch.tensor(SCALE), "net.shift": torch.linspace(-1, 1, len(state["net.shift"]))}
    wrong = [name for name, value in wanted.items() if _off(state[name], value)]
    probe.expect(
        not wrong,
        f"after prepare, {_names(wrong)} has not the value that init_weights sets",
        hint="call the init_weights of the trained modules once they have memory",
    )
    changed = _differing(one.weights(), again.weights())
    probe.expect(
        not changed,
        f"with the same seed, {_names(changed)} begins with other values",
        hint="draw only from the `rng` that prepare is given",
    )
    name = "net.first.weight"
    probe.expect(
        not torch.equal(one.weights()[name], other.weights()[name]),
        f"with another seed, {name} begins with the same values",
        hint="draw from the `rng` that prepare is given",
    )


@_in_group
def initial_weights(probe: Probe) -> None:
    """Initial weights fill what they name, buffers too; what they do not name is initialised."""
    spared = "net.head.weight"
    given = {name: value for name, value in network_values().items() if name != spared}
    drawn, trial = Trial(probe.build()), Trial(probe.build(), values=given)
    state = whole(trial.engine.state_dict()["model"].items())
    lost = [name for name, value in given.items() if _unlike(state[name], value)]
    probe.expect(
        not lost,
        f"after prepare, {_names(lost)} has other values than the initial weights",
        hint="call `weights.fill` after the random initialisation",
    )
    probe.expect(
        torch.equal(state[spared], drawn.weights()[spared]),
        f"{spared}, which the initial weights do not name, is not initialised",
        accepted="the values that it has without initial weights",
    )


@_in_group
def trains(probe: Probe) -> None:
    """Two steps with AdamW give the losses and weights of a loop in plain torch."""
    trial, plain = _trained(probe), Plain()
    for step in range(2):
        found, wanted = trial.step(step), plain.step(step)
        _expect_number(probe, f"the loss of step {step + 1}", found[0], wanted[0])
        _expect_weights(probe, trial.weights(), plain.weights(), f"after step {step + 1}")


@_in_group
def micro_batches(probe: Probe) -> None:
    """A step in four micro-batches is one in a single batch, and micro_step returns each loss as it was."""
    trial, plain = _trained(probe, sgd), Plain(sgd)
    for step in range(2):
        trial.step(step, micros=4)
        plain.step(step)
    hint = "add up gradients over the micro-batches of a step, and clear them after the update"
    _expect_weights(probe, trial.weights(), plain.weights(), "after two steps of four micro-batches", hint)

    def compute() -> Loss:
        return replace(trial.compute(2), metrics={"error": torch.ones(())})

    loss = trial.engine.micro_step(compute, last=True, scale=0.25)
    trial.engine.discard()
    _expect_number(probe, "the loss that micro_step returns", float(loss.total.detach()), plain.loss(2))
    kept = loss.weight == sum(WEIGHTS) and loss.metrics.keys() == {"error"}
    probe.expect(
        kept and not loss.total.requires_grad,
        "micro_step does not return the loss, detached, with its weight and metrics",
        hint="return dataclasses.replace(loss, total=loss.total.detach())",
    )


@_in_group
def gradient_norm(probe: Probe) -> None:
    """grad_norm is the L2 norm of all gradients together, as torch computes it."""
    trial, plain = _trained(probe, sgd), Plain(sgd)
    trial.backward(0, micros=2)
    _expect_number(probe, "grad_norm", trial.engine.grad_norm(), plain.step(0)[1])


@_in_group
def clipping(probe: Probe) -> None:
    """step scales gradients to the largest norm if theirs is larger, and leaves smaller ones as they are."""
    for share, words in ((0.25, "a quarter of"), (4.0, "four times"), (None, "no limit instead of")):
        trial, plain = _trained(probe, sgd), Plain(sgd)
        trial.engine.scale_lr(1.0)
        trial.backward(0)
        norm = trial.engine.grad_norm()
        clip = None if share is None else share * norm
        trial.engine.step(norm, clip)
        plain.step(0, clip=clip)
        when = f"after a step that clips at {words} the norm"
        _expect_weights(probe, trial.weights(), plain.weights(), when)


@_in_group
def learning_rates(probe: Probe) -> None:
    """scale_lr sets each group's rate to its base rate, with its lr_scale, times the factor."""
    trial, plain = _trained(probe, sgd), Plain(sgd)
    _expect_number(probe, "base_lr", trial.engine.base_lr, LR)
    _expect_number(probe, "what scale_lr(0.5) returns", trial.engine.scale_lr(0.5), 0.5 * LR)
    for step, factor in enumerate((0.5, 0.0, 1.0)):
        before = trial.weights()
        trial.step(step, factor=factor)
        plain.step(step, factor)
        when = f"after scale_lr({factor:g}) and a step"
        if not factor:
            moved = _differing(before, trial.weights())
            probe.expect(
                not moved, f"{when}, {_names(moved)} has changed", accepted="no change at the rate 0"
            )
        hint = "keep the base rates of the groups, and multiply each by the group's lr_scale"
        _expect_weights(probe, trial.weights(), plain.weights(), when, hint)


@_in_group
def skipped_steps(probe: Probe) -> None:
    """A loss that is not finite makes the norm so, and a discarded step leaves no trace."""
    for at in (0, 1):
        trial, plain = _trained(probe), Plain()
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
        moved = _differing(before, trial.weights())
        probe.expect(not moved, f"discard changes {_names(moved)}", accepted="cleared gradients alone")
        trial.step(2)
        plain.step(2)
        hint = "clear the gradients in discard, and take no step of the optimizer"
        _expect_weights(probe, trial.weights(), plain.weights(), "in the step after a discarded one", hint)


@_in_group
def resumes(probe: Probe) -> None:
    """With the state of another engine, a new one goes on bit for bit; the template has its names."""
    trial, again = _trained(probe), Trial(probe.build(), seed=9)
    for step in range(2):
        trial.step(step)
    with torch.no_grad():
        trial.task.net.shift.add_(1)
    state = trial.engine.state_dict()
    _expect_state(probe, trial, state)
    state = {part: {name: t.detach().clone() for name, t in held.items()} for part, held in state.items()}
    before = again.weights()
    template = again.engine.state_template({name.rpartition(".")[0] for name in state["optimizer"]})
    for part, held in state.items():
        other = held.keys() ^ template[part].keys()
        probe.expect(not other, f"state_template and state_dict differ in {part}: {_names(other)}")
    moved = _differing(before, again.weights())
    probe.expect(not moved, f"state_template changes {_names(moved)}", hint="make the state at the rate 0")
    some = Trial(probe.build()).engine.state_template({"net.first.weight"})["optimizer"]
    made = {name.rpartition(".")[0] for name in some}
    probe.expect(
        made == {"net.first.weight"},
        f"state_template, given net.first.weight, makes optimizer state of {_names(made)}",
        accepted="state of the given parameters: others would count steps that they never made",
    )
    again.engine.load_state_dict(state)
    probe.expect(
        torch.equal(trial.task.net.shift, again.task.net.shift),
        "load_state_dict does not load the buffer net.shift",
    )
    losses = [each.step(2, factor=0.5)[0] for each in (trial, again)]
    lost = _differing(trial.weights(), again.weights())
    probe.expect(
        losses[0] == losses[1] and not lost,
        f"the first step of a resumed run has other bits in {_names(lost) or 'the loss'}",
        accepted="equal bits",
        hint="put all that a step depends on into state_dict, and load it in load_state_dict",
    )


def _expect_state(probe: Probe, trial: Trial, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Expects the names and types of a checkpoint."""
    probe.expect(
        state.keys() == {"model", "optimizer"},
        f"state_dict has {_names(state.keys())}",
        accepted='{"model": ..., "optimizer": ...}',
    )
    plain = [
        f"{part}.{n}" for part, held in state.items() for n, t in held.items() if not isinstance(t, Tensor)
    ]
    probe.expect(not plain, f"state_dict has {_names(plain)}, which is no tensor", accepted="tensors only")
    unknown = {name.rpartition(".")[0] for name in state["optimizer"]} ^ trial.weights().keys()
    probe.expect(
        not unknown,
        f"the optimizer's part of state_dict does not name the trained parameters: {_names(unknown)}",
        accepted="`path.key`: the path of the parameter in the task, and the optimizer's key",
    )


@_in_group
def exported_weights(probe: Probe) -> None:
    """The model's part of state_dict is what the model computes with: all names, values and dtypes."""
    trial = _trained(probe)
    trial.step(0)
    model = whole(trial.engine.state_dict()["model"].items())
    wanted = network_values()
    other = model.keys() ^ wanted.keys()
    probe.expect(
        not other,
        f"the model's part of state_dict has too many or too few names: {_names(other)}",
        accepted="each parameter and stored buffer of the trained modules, by path in the task",
    )
    wrong = [
        name for name, t in model.items() if (t.shape, t.dtype) != (wanted[name].shape, wanted[name].dtype)
    ]
    probe.expect(not wrong, f"{_names(wrong)} has another shape or dtype in state_dict than in the model")
    lost = [name for name, tensor in trial.weights().items() if _unlike(tensor, model[name])]
    probe.expect(not lost, f"{_names(lost)} has other values in state_dict than in named_parameters")
    found = Plain(values=model).loss(1)
    _expect_number(probe, "the loss of the engine's model", trial.loss(1), found)


@_in_group
def frozen_weights(probe: Probe) -> None:
    """Parameters without a gradient and frozen components keep their values, and no optimizer gets them."""
    names: list[str] = []

    def noting(named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        names.extend(named)
        return adamw(named)

    trial, values = _trained(probe, noting), drawn_values()
    other = Plain().parameters.keys() ^ names
    probe.expect(
        not other,
        f"the optimizer gets other parameters than the trained ones: {_names(other)}",
        accepted="the parameters that require a gradient, by path in the task",
    )
    trial.step(0)
    state = whole(trial.engine.state_dict()["model"].items())
    moved = [name for name in FROZEN if not torch.equal(state[name], values[name])]
    probe.expect(not moved, f"a step changes {_names(moved)}, which is frozen")
    x = torch.linspace(-1, 1, 8).view(2, 4)
    found = trial.task.encoder.encode(x.to(trial.engine.device))
    wanted = torch.nn.functional.linear(x, values["encoder.layer.weight"], values["encoder.layer.bias"])
    probe.expect(
        not _off(found.detach().cpu(), wanted) and not found.requires_grad,
        "the frozen component computes with other weights than place_frozen was given, or with a gradient",
        hint="fill each component of `plan.frozen` from `weights.covers(state)`",
    )


@_in_group
def evaluation(probe: Probe) -> None:
    """evaluating() is evaluation mode without gradients, restores the modes, and sees the newest weights."""
    trial, plain = _trained(probe), Plain()
    net = trial.task.net
    net.blocks[0].eval()
    before = [module.training for module in net.modules()]
    for step in range(2):  # evaluated before and after an update
        with trial.engine.evaluating():
            modes, grad = {module.training for module in net.modules()}, torch.is_grad_enabled()
            loss = float(trial.compute(5).total)
        probe.expect(
            modes == {False} and not grad,
            "within evaluating() modules are in training mode, or gradients are computed",
        )
        probe.expect(
            before == [module.training for module in net.modules()] and torch.is_grad_enabled(),
            "after evaluating() modules are in other modes than before, or gradients stay off",
        )
        _expect_number(probe, f"the loss in an evaluation after {step} steps", loss, plain.loss(5))
        trial.step(step)
        plain.step(step)


@_in_group
def untrained(probe: Probe) -> None:
    """Without an optimizer, the engine prepares a task that is evaluated only."""
    trial = _trained(probe, None)
    _expect_number(probe, "the loss in an evaluation without training", trial.loss(0), Plain().loss(0))


_ON_RANKS = by_name(sharded_training, sharded_checkpoint)


KIT = Kit(
    by_name(
        *(plans, initialises, initial_weights, trains, micro_batches, gradient_norm, clipping),
        *(learning_rates, skipped_steps, resumes, exported_weights, frozen_weights, evaluation, untrained),
        *_ON_RANKS.values(),
    ),
    probe=EngineProbe,
    ranks=tuple(_ON_RANKS),
)
"""The conformance checks of engines."""
