"""Conformance checks of an engine's plan and weights: how they begin, and what a checkpoint gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from mm_core.contracts import EnginePlan
from mm_core.errors import plural
from mm_core.testing.tensors import bits_differ, differing, names
from mm_core.testing.training.engines.probe import EngineProbe, off
from mm_core.testing.training.engines.task import (
    FROZEN,
    SCALE,
    Net,
    Plain,
    TinyTask,
    Trial,
    adamw,
    drawn_values,
    network_values,
    task_on_meta,
    whole,
)


def plans(probe: EngineProbe) -> None:
    """A plan leaves the task on meta, names modules that exist, and its bytes are those of the tensors."""
    engine, task = probe.build(), task_on_meta()
    one, two = (engine.plan(task, world, 2.0) for world in (1, 2))
    engine.plan(task, 3, 0.0, purpose="sample")  # a stored run is sampled on any number of ranks
    moved = [name for name, tensor in task.state_dict().items() if not tensor.is_meta]
    probe.expect(
        not moved and type(task.net) is Net,
        f"plan changes the task: {names(moved) or 'its modules'}",
        accepted="a task that stays on meta: `mm-train --dry-run` plans without a device",
    )
    paths = {name for name, _ in task.named_modules()}
    for world, plan in ((1, one), (2, two)):
        probe.expect(
            plan.world == world
            and world % plan.data_parallel == 0
            and math.prod(plan.mesh.values()) == world,
            f"the plan of {plural(world, 'rank')} has world {plan.world}, data_parallel"
            f" {plan.data_parallel} and the mesh {dict(plan.mesh)}",
            accepted="world as given, data_parallel that divides it, and a mesh of that many ranks",
        )
        shown = (path for paths in plan.details.values() for path in paths)
        named = (*plan.recomputed, *plan.ignored, *plan.cast_inputs, *shown)
        unknown = set(named) - paths
        probe.expect(not unknown, f"the plan names modules that the task has not: {names(unknown)}")
    _expect_bytes(probe, task, one, two, engine.plan(task, 1, 4.0))


def _expect_bytes(
    probe: EngineProbe, task: TinyTask, one: EnginePlan, two: EnginePlan, more: EnginePlan
) -> None:
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
            f"on one rank, {what} is {found:,}, but the tensors have {plural(tensors, 'byte')}",
            accepted="bytes, of all tensors that a rank holds",
        )
    for what in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        whole_bytes, share = asdict(one)[what], asdict(two)[what]
        probe.expect(
            0.5 * whole_bytes <= share <= whole_bytes,
            f"{what} is {share:,} on two ranks, and {whole_bytes:,} on one",
            accepted="the largest share of any rank: between the half and all",
        )


def initialises(probe: EngineProbe) -> None:
    """Without initial weights, every parameter and buffer is set by the modules and by the seed alone."""
    one, again, other = (Trial(probe.build(), seed=seed) for seed in (0, 0, 1))
    state = whole(one.engine.state_dict()["model"].items())
    wanted = {"net.scale": torch.tensor(SCALE), "net.shift": torch.linspace(-1, 1, len(state["net.shift"]))}
    wrong = [name for name, value in wanted.items() if off(state[name], value)]
    probe.expect(
        not wrong,
        f"after prepare, {names(wrong)} has not the value that init_weights sets",
        hint="call the init_weights of the trained modules once they have memory",
    )
    changed = differing(one.weights(), again.weights())
    probe.expect(
        not changed,
        f"with the same seed, {names(changed)} begins with other values",
        hint="draw only from the `rng` that prepare is given",
    )
    name = "net.first.weight"
    probe.expect(
        not torch.equal(one.weights()[name], other.weights()[name]),
        f"with another seed, {name} begins with the same values",
        hint="draw from the `rng` that prepare is given",
    )


def initial_weights(probe: EngineProbe) -> None:
    """Initial weights fill what they name, buffers too; what they do not name is initialised."""
    spared = "net.head.weight"
    given = {name: value for name, value in network_values().items() if name != spared}
    drawn, trial = Trial(probe.build()), Trial(probe.build(), values=given)
    state = whole(trial.engine.state_dict()["model"].items())
    lost = [name for name, value in given.items() if bits_differ(state[name], value)]
    probe.expect(
        not lost,
        f"after prepare, {names(lost)} has other values than the initial weights",
        hint="call `weights.fill` after the random initialisation",
    )
    probe.expect(
        torch.equal(state[spared], drawn.weights()[spared]),
        f"{spared}, which the initial weights do not name, is not initialised",
        accepted="the values that it has without initial weights",
    )


def resumes(probe: EngineProbe) -> None:
    """With the state of another engine, a new one goes on bit for bit; the template has its names."""
    trial, again = probe.trained(), Trial(probe.build(), seed=9)
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
        probe.expect(not other, f"state_template and state_dict differ in {part}: {names(other)}")
    moved = differing(before, again.weights())
    probe.expect(not moved, f"state_template changes {names(moved)}", hint="make the state at the rate 0")
    some = Trial(probe.build()).engine.state_template({"net.first.weight"})["optimizer"]
    made = {name.rpartition(".")[0] for name in some}
    probe.expect(
        made == {"net.first.weight"},
        f"state_template, given net.first.weight, makes optimizer state of {names(made)}",
        accepted="state of the given parameters: others would count steps that they never made",
    )
    again.engine.load_state_dict(state)
    probe.expect(
        torch.equal(trial.task.net.shift, again.task.net.shift),
        "load_state_dict does not load the buffer net.shift",
    )
    losses = [each.step(2, factor=0.5)[0] for each in (trial, again)]
    lost = differing(trial.weights(), again.weights())
    probe.expect(
        losses[0] == losses[1] and not lost,
        f"the first step of a resumed run has other bits in {names(lost) or 'the loss'}",
        accepted="equal bits",
        hint="put all that a step depends on into state_dict, and load it in load_state_dict",
    )


def _expect_state(probe: EngineProbe, trial: Trial, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Expects the names and types of a checkpoint."""
    plain = [
        f"{part}.{n}" for part, held in state.items() for n, t in held.items() if not isinstance(t, Tensor)
    ]
    probe.expect(not plain, f"state_dict has {names(plain)}, which is not a tensor", accepted="tensors only")
    unknown = {name.rpartition(".")[0] for name in state["optimizer"]} ^ trial.weights().keys()
    probe.expect(
        not unknown,
        f"the optimizer's part of state_dict does not name the trained parameters: {names(unknown)}",
        accepted="`path.key`: the path of the parameter in the task, and the optimizer's key",
    )


def exported_weights(probe: EngineProbe) -> None:
    """The model's part of state_dict is what the model computes with: all names, values and dtypes."""
    trial = probe.trained()
    trial.step(0)
    model = whole(trial.engine.state_dict()["model"].items())
    wanted = network_values()
    other = model.keys() ^ wanted.keys()
    probe.expect(
        not other,
        f"the model's part of state_dict has too many or too few names: {names(other)}",
        accepted="each parameter and stored buffer of the trained modules, by path in the task",
    )
    wrong = [
        name for name, t in model.items() if (t.shape, t.dtype) != (wanted[name].shape, wanted[name].dtype)
    ]
    probe.expect(not wrong, f"{names(wrong)} has another shape or dtype in state_dict than in the model")
    lost = [name for name, tensor in trial.weights().items() if bits_differ(tensor, model[name])]
    probe.expect(not lost, f"{names(lost)} has other values in state_dict than in named_parameters")
    found = Plain(values=model).loss(1)
    probe.expect_number("the loss of the engine's model", trial.loss(1), found)


def frozen_weights(probe: EngineProbe) -> None:
    """Parameters without a gradient and frozen components keep their values, and no optimizer gets them."""
    given: list[str] = []

    def noting(named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        given.extend(named)
        return adamw(named)

    trial, values = probe.trained(noting), drawn_values()
    other = Plain().parameters.keys() ^ given
    probe.expect(
        not other,
        f"the optimizer gets other parameters than the trained ones: {names(other)}",
        accepted="the parameters that require a gradient, by path in the task",
    )
    trial.step(0)
    state = whole(trial.engine.state_dict()["model"].items())
    moved = [name for name in FROZEN if not torch.equal(state[name], values[name])]
    probe.expect(not moved, f"a step changes {names(moved)}, which is frozen")
    x = torch.linspace(-1, 1, 8).view(2, 4)
    found = trial.task.encoder.encode(x.to(trial.engine.device))
    wanted = torch.nn.functional.linear(x, values["encoder.layer.weight"], values["encoder.layer.bias"])
    probe.expect(
        not off(found.detach().cpu(), wanted) and not found.requires_grad,
        "the frozen component computes with other weights than place_frozen was given, or with a gradient",
        hint="fill each component of `plan.frozen` from `weights.covers(state)`",
    )


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
    probe.expect(
        not wrong and len(given) == len(wanted),
        f"once the masters of shards() are doubled, {names(wrong) or 'their number'} is wrong",
        accepted="each trained parameter once, with its shape, and with values and dtype in `stored(master)`",
    )
    what = "the loss with what was written into shards"
    probe.expect_number(what, trial.loss(1), Plain(values=wanted).loss(1), "with these weights")
