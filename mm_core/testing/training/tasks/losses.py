"""Conformance checks of a task's parts and losses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Batch, Frozen, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.loading.frozen import load_frozen
from mm_core.modules.shards import gathered
from mm_core.plugin.registry import Registry
from mm_core.runtime.process_group import process_group
from mm_core.testing.data.reading import equal, expect_no_weights
from mm_core.testing.kit import NotApplicable
from mm_core.testing.ranks import ComponentBuild, on_ranks
from mm_core.testing.tensors import differing, expect_gradients, names
from mm_core.testing.training.tasks.probe import TaskProbe, loss_of_batch, near, state_of, total_of

_STEPS = 8
"""Steps in which each trained parameter must have a gradient: a task may train one expert a step."""


def modules(probe: TaskProbe) -> None:
    """`trainable` and `frozen` name parts of the task, which are built without memory."""
    task = probe.on_meta()
    for name in task.trainable:
        try:
            module = task.get_submodule(name)
        except AttributeError:
            module = None
        probe.expect(
            isinstance(module, nn.Module),
            f"`trainable` names {name!r}, which is not a module of the task",
            accepted=", ".join(n for n, _ in task.named_children()) or "modules assigned to the task",
        )
        real = [key for key, tensor in module.state_dict().items() if not tensor.is_meta]
        probe.expect(
            not real,
            f"{name}.{real[:1] and real[0]} has memory, though the task was built on the meta device",
            accepted="tensors on the default device: each rank gets only its shards",
            hint="do not set a device in constructors, and fill tensors in init_weights",
        )
    for name in task.frozen:
        probe.expect(
            isinstance(getattr(task, name, None), Frozen),
            f"`frozen` names {name!r}, which is not a frozen component of the task",
            accepted="components with `missing_files`, and `load` or `build_empty`",
        )


def initialisation(probe: TaskProbe) -> None:
    """Every tensor of the trained modules is filled, and equal seeds give equal weights."""
    first, second = state_of(probe.ready()), state_of(probe.ready())
    different = differing(first, second)
    probe.expect(not different, f"equal seeds give different weights: {names(different)}")


def accepts_its_data(probe: TaskProbe) -> None:
    """`check` accepts the options of the dataset that the task is tested with."""
    options = probe.data.probe.config.options
    accepted = "the dataset that the task is tested with"
    probe.expect_no_error("check", accepted, probe.on_meta().check, options)


def transforms(probe: TaskProbe) -> None:
    """The batch transform goes to data workers, without weights, and makes equal batches there."""
    transform = probe.task.batch_transform()
    rows = range(probe.data.rows)
    here = transform(probe.data.batch((), rows)[0])
    there = probe.probe.in_worker("what batch_transform returns", transform)(probe.data.batch((), rows)[0])
    expect_no_weights(
        probe.probe,
        "what batch_transform returns",
        transform,
        "return a function of the settings, no method of the task",
    )
    probe.expect(isinstance(here, Batch), f"the batch transform returned a {type(here).__name__}", "a Batch")
    probe.expect(
        equal(here, there), "the batch transform makes another batch in a data worker", hint="keep no state"
    )


def loss(probe: TaskProbe) -> None:
    """The loss is a float32 sum with a gradient, and its metrics and bins have none."""
    found = probe.loss(probe.batch(range(probe.data.rows)))
    probe.expect(
        found.total.dtype == torch.float32,
        f"the loss is of {found.total.dtype}, in which sums over ranks lose digits",
        accepted="torch.float32",
        hint="compute the loss from `predicted.float()`",
    )
    others = {**found.metrics, **({} if found.bins is None else {"bins": found.bins})}
    for name, value in others.items():
        probe.expect(
            isinstance(value, Tensor) and not value.requires_grad,
            f"`{name}` of the loss is no tensor, or holds the graph of the forward",
            accepted="a detached tensor",
            hint="detach it: its memory is needed for the next micro-batch",
        )


def weights(probe: TaskProbe) -> None:
    """The loss's weight is that of `weight(batch)`, and the sum of its samples' weights."""
    for given in ([1.0, 1.0], [0.5, 0.0]):
        batch = probe.batch(range(probe.data.rows), given[: probe.data.rows])
        before, after = probe.task.weight(batch), probe.loss(batch).weight
        probe.expect(
            isinstance(before, float | int) and near(before, after),
            f"weight(batch) is {before}, and the weight of the batch's loss is {after}",
            accepted="the same number: ranks exchange weights before the forward",
        )
    rows = probe.pair
    alone = [probe.task.weight(probe.batch([row])) for row in rows]
    whole = probe.task.weight(probe.batch(rows))
    probe.expect(
        near(whole, sum(alone)),
        f"the weight of two samples is {whole:g}, and those of each alone are {alone[0]:g} and {alone[1]:g}",
        accepted="their sum: the weight counts what the loss sums",
    )
    half = probe.task.weight(probe.batch(rows, [1.0, 0.0]))
    probe.expect(
        near(half, alone[0]),
        f"the weight of a batch is {half:g} with a sample of weight 0, and {alone[0]:g} without it",
        hint="multiply by batch.sample_weights",
    )


def sums(probe: TaskProbe) -> None:
    """The loss of a batch is the sum of its samples' losses, each times its weight."""
    rows = probe.pair
    alone = [total_of(probe.loss(probe.batch([row]))) for row in rows]
    whole = total_of(probe.loss(probe.batch(rows)))
    kinds = ((sum(alone), "the sum"), (sum(alone) / 2, "the mean"), (alone[0], "that of the first sample"))
    wrong = next((words for value, words in kinds[1:] if near(whole, value)), "another value")
    probe.expect(
        near(whole, sum(alone)),
        f"the loss of two samples is {whole:.7g}, {wrong}; those of each alone are {alone[0]:.7g} and"
        f" {alone[1]:.7g}",
        accepted=f"their sum {sum(alone):.7g}, so that means over ranks and micro-batches are exact",
        hint="sum over the samples, and draw with `rng.normal(shape, name, *key)` for key in batch.keys;"
        " declare a loss that compares samples in expected_failures",
    )
    half = total_of(probe.loss(probe.batch(rows, [0.5, 0.0])))
    probe.expect(
        near(half, alone[0] / 2),
        f"with the sample weights 0.5 and 0, the loss is {half:.7g}",
        accepted=f"{alone[0] / 2:.7g}, half of the first sample's loss",
        hint="multiply each sample's loss by batch.sample_weights",
    )


def determinism(probe: TaskProbe) -> None:
    """Equal batches give equal bits: the task keeps nothing from batch to batch."""
    rows = range(probe.data.rows)
    task = probe.ready()
    first = probe.loss(probe.batch(rows), task).total
    others = [row for row in range(len(probe.data.dataset)) if row not in rows][: len(rows)]
    probe.loss(probe.batch(others or list(rows)[::-1]), task)
    again = probe.loss(probe.batch(rows), task).total
    probe.expect(
        torch.equal(first, again),
        f"the loss of a batch is {float(first.detach()):.7g}, and {float(again.detach()):.7g} after another",
        accepted="the same bits: a resumed run has seen no other batch",
        hint="keep nothing from batch to batch, and draw from `rng` alone",
    )


def inputs_unchanged(probe: TaskProbe) -> None:
    """The task changes no tensor of a batch in place: the loop may compute the batch again."""
    rows = range(probe.data.rows)
    for what, call in (("the loss", probe.loss), ("evaluate", probe.evaluation)):
        batch = probe.batch(rows)
        held = copy.deepcopy(batch)
        call(batch)
        for name, value in vars(held).items():
            probe.expect(
                equal(value, getattr(batch, name)),
                f"{what} changes `{name}` of the batch",
                accepted="an unchanged batch: the loop may compute it again",
                hint="use no in-place operation on what the batch holds",
            )


def gradients(probe: TaskProbe) -> None:
    """Every trained parameter gets a finite gradient, and no frozen one does."""
    task = probe.ready()
    for step in range(_STEPS):
        torch.autograd.backward(probe.loss(probe.batch(range(probe.data.rows)), task, step).total)
    trained = {
        f"{root}.{name}": parameter
        for root in task.trainable
        for name, parameter in task.get_submodule(root).named_parameters()
        if parameter.requires_grad
    }
    expect_gradients(probe, trained, "loss")
    known = {id(parameter) for parameter in trained.values()}
    strays = [n for n, p in task.named_parameters() if p.grad is not None and id(p) not in known]
    probe.expect(
        not strays,
        f"{', '.join(strays[:8])} gets a gradient, and is not trained",
        hint="call frozen components in `prepare`, or under torch.no_grad()",
    )


def sharded_modules(probe: TaskProbe) -> None:
    """The loss is computed in an engine that shards the trained modules: they are called as modules."""
    task = probe.on_meta()
    expected = total_of(probe.loss(probe.batch(range(probe.data.rows)), probe.ready()))
    with process_group() as ranks:
        try:
            _in_engine(task, ranks.count, probe.probe.registry)
        except PlanError as fault:
            raise NotApplicable(f"the engine cannot plan it: {fault.what}") from fault
        batch = probe.batch(range(probe.data.rows), task=task)
        what = "with its modules sharded, the loss"
        accepted = "calls of trained modules, not of their layers: only a module's forward sees whole weights"
        found = total_of(probe.expect_no_error(what, accepted, probe.loss, batch, task))
        probe.expect(near(found, expected), f"{what} is {found:.7g} instead of {expected:.7g}")


def _in_engine(task: Any, world: int, registry: Registry | None = None) -> FSDP2Engine:
    """An engine that has sharded a task's modules, on the ranks of the process group."""
    engine = FSDP2Engine()
    plan = engine.plan(task, world, 1.0)
    for name in task.frozen:
        load_frozen(getattr(task, name), "cpu", registry)
    engine.prepare(task, plan, lambda named: torch.optim.SGD(named.values()), Randomness(0), None)
    task.eval()
    return engine


def over_ranks(probe: TaskProbe) -> None:
    """Two ranks with a sample each have the gradients of one rank with both."""
    rows = probe.pair
    halves, whole = [probe.batch([row]) for row in rows], probe.batch(rows)
    if near(sum(total_of(probe.loss(half)) for half in halves), total_of(probe.loss(whole))):
        raise NotApplicable("samples are not compared: the loss is the sum over them, on any number of ranks")
    build, weight = ComponentBuild(probe.probe), probe.task.weight(whole)
    try:
        two, one = (  # pickled, since a batch's class may be the plugin's
            on_ranks(len(batches), _gradients_over_ranks, (build, weight, pickle.dumps(batches)))[0]
            for batches in (halves, [whole])
        )
    except PlanError as fault:
        raise NotApplicable(f"the engine cannot plan it: {fault.what}") from fault
    most = 1e-4 * max(float(grad.abs().max()) for grad in one.values())
    wrong = [name for name in one if name not in two or float((two[name] - one[name]).abs().max()) > most]
    probe.expect(
        not wrong,
        f"on 2 ranks with a sample each, other gradients than on one come out for {', '.join(wrong[:8])}",
        accepted="those of one rank with both samples",
        hint="compare with the samples of all ranks, with their gradients: `mm_core.parallel.gather_samples`",
    )


def _gradients_over_ranks(work: tuple[ComponentBuild, float, bytes]) -> dict[str, Tensor]:
    """Run by each rank: the gradients over all ranks, each of which has its batch."""
    build, weight, pickled = work
    with torch.device("meta"):
        task = build()
    batches = pickle.loads(pickled)
    engine = _in_engine(task, len(batches))
    batch = batches[engine.data_ranks.rank]
    engine.micro_step(lambda: loss_of_batch(task, batch), last=True, scale=len(batches) / weight)
    return {name: gathered(p.grad) for name, p in engine.named_parameters() if p.grad is not None}


def bins(probe: TaskProbe) -> None:
    """The loss in bins adds up to the loss, and its weights to the weight."""
    scale = probe.task.bins
    if scale is None:
        raise NotApplicable("the task has no bins")
    count = len(scale.edges) - 1
    probe.expect(
        list(scale.edges) == sorted(set(scale.edges)) and len(scale.declared) == count,
        f"bins have {len(scale.edges)} edges and {len(scale.declared)} declared shares",
        accepted="n + 1 increasing edges and n shares",
    )
    batch = probe.batch(range(probe.data.rows))
    found = probe.loss(batch)
    shape = None if found.bins is None else tuple(found.bins.shape)
    probe.expect(shape == (2, count), f"Loss.bins has the shape {shape}", accepted=f"(2, {count})")
    assert found.bins is not None
    rows = ("losses", total_of(found)), ("weights", float(batch.sample_weights.sum()))
    for (name, wanted), row in zip(rows, found.bins.detach().double(), strict=True):
        probe.expect(
            near(float(row.sum()), wanted),
            f"the {name} in the bins add up to {float(row.sum()):.7g}",
            accepted=f"{wanted:.7g}, as those of the batch",
        )
