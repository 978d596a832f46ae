"""The conformance checks of engines (`mm_core.contracts.Engine`).

An engine is driven by its contract alone, and compared with a loop of plain torch over the same task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any

import torch

from mm_core.contracts import Loss
from mm_core.errors import plural
from mm_core.runtime.process_group import process_group
from mm_core.testing.kit import Check, Kit, checks_of
from mm_core.testing.tensors import bits_differ, differing
from mm_core.testing.training.engines import sharded
from mm_core.testing.training.engines.probe import EngineProbe, off
from mm_core.testing.training.engines.task import (
    FROZEN,
    LR,
    SCALE,
    WEIGHTS,
    Net,
    Plain,
    Trial,
    adamw,
    drawn_values,
    network_values,
    poisoned,
    task_on_meta,
    whole,
)

_STEPS: Mapping[str, Mapping[str, Any]] = {
    "after scale_lr(0.5) and a step": {"factor": 0.5},
    "after scale_lr(0) and a step": {"factor": 0.0},
    "after scale_lr(1) and a step": {"factor": 1.0},
    "after a step of four micro-batches": {"micros": 4},
    "after two steps of four micro-batches": {"micros": 4},
    "after a step that clips at a small norm": {"clip": 0.01},
    "after a step that clips at a large norm": {"clip": 100.0},
}
"""When -> how a step is taken: arguments of `Trial.step`."""


def plans(probe: EngineProbe) -> None:
    """A plan leaves the task on meta, names modules that exist, and its bytes are those of the tensors."""
    engine, task = probe.build(), task_on_meta()
    one, two, more = (engine.plan(task, world, state) for world, state in ((1, 2.0), (2, 2.0), (1, 4.0)))
    engine.plan(task, 3, 0.0, purpose="sample")  # a stored run is sampled on any number of ranks
    moved = [name for name, tensor in task.state_dict().items() if not tensor.is_meta]
    moved += ["its modules"] * (type(task.net) is not Net)
    accepted = "a task that stays on meta: `mm-train --dry-run` plans without a device"
    probe.expect_none(moved, "plan changes the task: {}", accepted=accepted)
    paths = {name for name, _ in task.named_modules()}
    for world, plan in ((1, one), (2, two)):
        divided = world % plan.data_parallel == 0 and math.prod(plan.mesh.values()) == world
        probe.expect(
            plan.world == world and divided,
            f"the plan of {plural(world, 'rank')} has world {plan.world}, data_parallel"
            f" {plan.data_parallel} and the mesh {dict(plan.mesh)}",
            accepted="world as given, data_parallel that divides it, and a mesh of that many ranks",
        )
        named = {*plan.recomputed, *plan.ignored, *plan.cast_inputs, *chain(*plan.details.values())}
        probe.expect_none(named - paths, "the plan names modules that the task has not: {}")
    parameters = [*task.net.parameters()]
    own, trained = (sum(p.nbytes for p in parameters if p.requires_grad or every) for every in (True, False))
    state = more.optimizer_bytes - one.optimizer_bytes
    frozen = sum(each.device_bytes + each.host_bytes for each in one.frozen)
    for what, found, tensors, most in (  # in other dtypes, and with copies in fp32
        ("on one rank, parameter_bytes", one.parameter_bytes, own, 4),
        ("on one rank, gradient_bytes", one.gradient_bytes, trained, 4),
        ("on one rank, optimizer_bytes for two more tensors of state", state, 2 * trained, 4),
        ("on one rank, the bytes of frozen", frozen, 4 * 5 * (4 + 1), 4),
        ("on two ranks, parameter_bytes", two.parameter_bytes, one.parameter_bytes, 1),
        ("on two ranks, gradient_bytes", two.gradient_bytes, one.gradient_bytes, 1),
        ("on two ranks, optimizer_bytes", two.optimizer_bytes, one.optimizer_bytes, 1),
    ):
        probe.expect(
            0.5 * tensors <= found <= most * tensors,
            f"{what} is {found:,}, but the tensors have {plural(tensors, 'byte')}",
            accepted="bytes of all tensors that a rank holds: on two ranks, between the half and all",
        )


def initialises(probe: EngineProbe) -> None:
    """Initial weights fill what they name, buffers too; modules and the seed alone set the rest."""
    one, again, other = (Trial(probe.build(), seed=seed) for seed in (0, 0, 1))
    state = one.model()
    wanted = {"net.scale": torch.tensor(SCALE), "net.shift": torch.linspace(-1, 1, len(state["net.shift"]))}
    wrong = [name for name, value in wanted.items() if off(state[name], value)]
    hint = "call the init_weights of the trained modules once they have memory"
    probe.expect_none(wrong, "after prepare, {} has not the value that init_weights sets", hint)
    hint = "draw only from the `rng` that prepare is given"
    changed = differing(one.weights(), again.weights())
    probe.expect_none(changed, "with the same seed, {} begins with other values", hint)
    same = {"net.first.weight"}.difference(differing(one.weights(), other.weights()))
    probe.expect_none(same, "with another seed, {} begins with the same values", hint)
    given = network_values()
    del given["net.head.weight"]
    filled = Trial(probe.build(), values=given).model()
    lost = [name for name, value in given.items() if bits_differ(filled[name], value)]
    hint = "call `weights.fill` after the random initialisation"
    probe.expect_none(lost, "after prepare, {} has other values than the initial weights", hint)
    others = {"net.head.weight"}.intersection(differing(filled, state))
    probe.expect_none(others, "{}, which the initial weights do not name, is not initialised")


def resumes(probe: EngineProbe) -> None:
    """With the state of another engine, a new one goes on bit for bit; the template has its names."""
    trial, again = probe.trained(), Trial(probe.build(), seed=9)
    for step in range(2):
        trial.step(step)
    with torch.no_grad():
        trial.task.net.shift.add_(1)
    state = trial.engine.state_dict()
    plain = [f"{part}.{name}" for part in state for name, t in state[part].items() if not torch.is_tensor(t)]
    probe.expect_none(plain, "state_dict has {}, which is not a tensor", accepted="tensors only")
    stepped, known = _owners(state["optimizer"]), trial.weights().keys()
    what = "the optimizer's part of state_dict does not name the trained parameters: {}"
    accepted = "`path.key`: the path of the parameter in the task, and the optimizer's key"
    probe.expect_none(stepped ^ known, what, accepted=accepted)
    state = {part: {name: t.detach().clone() for name, t in held.items()} for part, held in state.items()}
    before = again.weights()
    template = again.engine.state_template(stepped)
    for part, held in state.items():
        what = f"state_template and state_dict differ in {part}: {{}}"
        probe.expect_none(held.keys() ^ template[part].keys(), what)
    moved = differing(before, again.weights())
    probe.expect_none(moved, "state_template changes {}", "make the state at the rate 0")
    asked = {"net.first.weight"}
    made = _owners(Trial(probe.build()).engine.state_template(asked)["optimizer"])
    what = "state_template, given net.first.weight, makes optimizer state of {}, or none of it"
    accepted = "state of the given parameters: others would count steps that they never made"
    probe.expect_none(made ^ asked, what, accepted=accepted)
    again.engine.load_state_dict(state)
    same = torch.equal(trial.task.net.shift, again.task.net.shift)
    probe.expect(same, "load_state_dict does not load the buffer net.shift")
    losses = [each.step(2, factor=0.5)[0] for each in (trial, again)]
    lost = differing(trial.weights(), again.weights()) + ["the loss"] * (losses[0] != losses[1])
    hint = "put all that a step depends on into state_dict, and load it in load_state_dict"
    probe.expect_none(lost, "the first step of a resumed run has other bits in {}", hint, "equal bits")


def _owners(optimizer: Mapping[str, object]) -> set[str]:
    """The parameters to which entries of an optimizer's state belong."""
    return {name.rpartition(".")[0] for name in optimizer}


def exported_weights(probe: EngineProbe) -> None:
    """state_dict has what the model computes with; what is frozen stays, and no optimizer gets it."""
    given: list[str] = []

    def noting(named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        given.extend(named)
        return adamw(named)

    trial, values, wanted = probe.trained(noting), drawn_values(), network_values()
    what = "the optimizer gets other parameters than the trained ones: {}"
    accepted = "the parameters that require a gradient, by path in the task"
    probe.expect_none(Plain().parameters.keys() ^ given, what, accepted=accepted)
    trial.step(0)
    model = trial.model()
    what = "the model's part of state_dict has too many or too few names: {}"
    accepted = "each parameter and stored buffer of the trained modules, by path in the task"
    probe.expect_none(model.keys() ^ wanted.keys(), what, accepted=accepted)
    wrong = [n for n, t in model.items() if (t.shape, t.dtype) != (wanted[n].shape, wanted[n].dtype)]
    probe.expect_none(wrong, "{} has another shape or dtype in state_dict than in the model")
    lost = [name for name, tensor in trial.weights().items() if bits_differ(tensor, model[name])]
    probe.expect_none(lost, "{} has other values in state_dict than in named_parameters")
    moved = set(FROZEN).intersection(differing(model, values))
    probe.expect_none(moved, "a step changes {}, which is frozen")
    x = torch.linspace(-1, 1, 8).view(2, 4)
    found = trial.task.encoder.encode(x.to(trial.engine.device))
    encoded = torch.nn.functional.linear(x, values["encoder.layer.weight"], values["encoder.layer.bias"])
    what = "the frozen component computes with other weights than place_frozen was given, or with a gradient"
    hint = "fill each component of `plan.frozen` from `weights.covers(state)`"
    probe.expect(not off(found.detach().cpu(), encoded) and not found.requires_grad, what, hint=hint)
    probe.expect_number("the loss of the engine's model", trial.loss(1), Plain(model).loss(1))


def shards(probe: EngineProbe) -> None:
    """shards() has each trained parameter once, as float32 memory that the next forward computes with."""
    trial = probe.trained()
    trial.step(0)
    wanted = {name: 2 * tensor for name, tensor in trial.weights().items()}
    with torch.no_grad():
        for shard in trial.engine.shards():
            shard.master.mul_(2)
    given = list(trial.engine.shards())
    wrong = differing(whole((shard.name, shard.stored(shard.master)) for shard in given), wanted)
    wrong += [s.name for s in given if s.name in wanted and tuple(s.shape) != tuple(wanted[s.name].shape)]
    wrong = wrong or ["their number"] * (len(given) != len(wanted))
    accepted = "each trained parameter once, with its shape, and with values and dtype in `stored(master)`"
    probe.expect_none(wrong, "once the masters of shards() are doubled, {} is wrong", accepted=accepted)
    what = "the loss with what was written into shards"
    probe.expect_number(what, trial.loss(1), Plain(values=wanted).loss(1), "with these weights")


def trains(probe: EngineProbe) -> None:
    """Steps of any micro-batches, largest norm and rate give the losses, weights and norms of plain torch."""
    trial, plain = probe.trained(), Plain()
    probe.expect_number("base_lr", trial.engine.base_lr, LR)
    probe.expect_number("what scale_lr(0.5) returns", trial.engine.scale_lr(0.5), 0.5 * LR)
    for number, (when, how) in enumerate(_STEPS.items()):
        (loss, norm), (wanted, right) = trial.step(number, **how), plain.step(number, **how)
        probe.expect_number("the loss that micro_step returns", loss, wanted)
        hint = "add up the gradients of a step, clip them, use each group's rate, and clear them at its end"
        probe.expect_weights(trial.weights(), plain.weights(), when, hint)
        probe.expect_number("grad_norm", norm, right)

    def compute() -> Loss:
        return replace(trial.compute(2), metrics={"error": torch.ones(())})

    made = trial.engine.micro_step(compute, last=True, scale=0.25)
    kept = made.weight == sum(WEIGHTS) and made.metrics.keys() == {"error"}
    what = "micro_step does not return the loss, detached, with its weight and metrics"
    hint = "return dataclasses.replace(loss, total=loss.total.detach())"
    probe.expect(kept and not made.total.requires_grad, what, hint=hint)


def skipped_steps(probe: EngineProbe) -> None:
    """A loss that is not finite makes the norm so, and a discarded step leaves no trace."""
    for at in (0, 1):
        trial, plain = probe.trained(), Plain()
        trial.step(0)
        plain.step(0)
        before = trial.weights()
        trial.backward(1, micros=2, change=poisoned(at))
        norm = trial.engine.grad_norm()
        what = f"the loss of micro-batch {at + 1} of 2 is NaN, but grad_norm is {norm:.4g}"
        hint = "a NaN may leave the gradients finite: start the backward of such a loss from NaN"
        probe.expect(not math.isfinite(norm), what, hint=hint)
        trial.engine.discard()
        moved = differing(before, trial.weights())
        probe.expect_none(moved, "discard changes {}", accepted="cleared gradients alone")
        trial.step(2)
        plain.step(2)
        hint = "clear the gradients in discard, and take no step of the optimizer"
        probe.expect_weights(trial.weights(), plain.weights(), "in the step after a discarded one", hint)


def evaluation(probe: EngineProbe) -> None:
    """evaluating() is evaluation mode without gradients, and sees the newest weights; optimizer or not."""
    trial, plain = probe.trained(), Plain()
    task = trial.task
    task.net.blocks[0].eval()
    before = [module.training for module in task.modules()]
    for step in range(2):  # evaluated before and after an update
        with trial.engine.evaluating():
            trained, grad = any(module.training for module in task.net.modules()), torch.is_grad_enabled()
            own, loss = task.training, float(trial.compute(5).total)
        what = "within evaluating() modules are in training mode, or gradients are computed"
        probe.expect(not trained and not grad, what)
        hint = "put the task that `prepare` gets into evaluation mode, not only its trained components"
        probe.expect(not own, "within evaluating() the task itself is in training mode", hint=hint)
        same = before == [module.training for module in task.modules()] and torch.is_grad_enabled()
        probe.expect(same, "after evaluating() modules are in other modes than before, or gradients stay off")
        probe.expect_number(f"the loss in an evaluation after {plural(step, 'step')}", loss, plain.loss(5))
        trial.step(step)
        plain.step(step)
    loss = probe.trained(None).loss(0)  # without an optimizer
    probe.expect_number("the loss in an evaluation without training", loss, Plain().loss(0))


def _in_group(check: Check) -> Check:
    """The check within a process group of this process, which an engine needs."""

    @wraps(check)
    def grouped(probe: EngineProbe) -> None:
        with process_group():
            probe.require_device(probe.build().device)
            check(probe)

    return grouped


_ALONE = checks_of(__name__)
_ON_RANKS = checks_of(sharded.__name__)
KIT = Kit(
    {**{name: _in_group(check) for name, check in _ALONE.items()}, **_ON_RANKS},
    probe=EngineProbe,
    ranks=tuple(_ON_RANKS),
)
"""The conformance checks of engines."""
