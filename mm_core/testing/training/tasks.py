"""The conformance kit of tasks (`mm_core.contracts.Task`): what the loop and an evaluation rely on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    Batch,
    Evaluation,
    Frozen,
    Loss,
    Randomness,
    SampleRequest,
    SupportsBeginStep,
    SupportsCheckRequest,
    VideoTextBatch,
    seeded,
)
from mm_core.contracts.bases.task_module import loss_of
from mm_core.errors import ContractError, MMError, first_line
from mm_core.loading.frozen import load_frozen
from mm_core.modules.initialise import initialise
from mm_core.modules.tying import tie, tied_names
from mm_core.testing.data.reading import SEED, DatasetProbe, equal
from mm_core.testing.kit import Kit, NotApplicable, Probe, by_name

_STEPS = 8
"""Steps in which each trained parameter must have a gradient: a task may train one expert a step."""
_QUANTILES = (0.25, 0.5, 0.75)
_CLOSE = 1e-4  # of a value: sums in another order, in float32


class TaskProbe:
    """A task under test, with batches of the dataset that it is tested with.

    Args:
        probe: builds new small instances.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.expect = probe.expect

    def on_meta(self) -> Any:
        """Builds a new task without memory for its weights, as the core does."""
        _ = self.probe.config  # its files are made with memory
        with torch.device("meta"):
            return self.probe.build()

    def ready(self, seed: int = 0) -> Any:
        """Builds a new task in evaluation mode on the CPU, filled as the engine fills it.

        Memory is filled with NaN first, so that values that are not initialised show.
        """
        task = self.on_meta()
        for name in task.trainable:
            module = task.get_submodule(name)
            tied = tied_names(module)
            module.to_empty(device="cpu")
            tie(module, tied)
            try:
                initialise(module, name, Randomness(seed))
            except MMError as fault:
                where = f"{self.probe.place}, {name}" if fault.where == name else fault.where
                raise ContractError(
                    fault.what, where=where, accepted=fault.accepted, hint=fault.hint
                ) from fault
        for name in task.frozen:
            load_frozen(getattr(task, name), "cpu", self.probe.registry)
        return task.eval()

    @cached_property
    def task(self) -> Any:
        """A task for all checks, in evaluation mode: without dropout. A check leaves it as it is."""
        return self.ready()

    @cached_property
    def data(self) -> DatasetProbe:
        """The dataset that the task is tested with: `examples` of its Component, or the plugin's first one.

        Raises:
            NotApplicable: there is none.
        """
        registered, registry = self.probe.registered, self.probe.registry
        fields: Mapping[str, object] | None = self.probe.examples
        folder = self.probe.folder / "dataset"
        folder.mkdir(exist_ok=True)
        if fields is not None:
            found = registry.resolve("dataset", str(fields["type"]))
            return DatasetProbe(
                Probe(found, registry, folder, {k: v for k, v in fields.items() if k != "type"})
            )
        own = [c for c in registry.components("dataset") if c.namespace == registered.namespace]
        if not own:
            raise NotApplicable(
                "its plugin has no dataset: name one by Component(..., examples='module:function'),"
                " a function that returns {'type': ..., ...}"
            )
        return DatasetProbe(Probe(own[0], registry, folder))

    def batch(self, rows: Sequence[int], weights: Sequence[float] = (), task: Any = None) -> Batch:
        """A batch of some of the dataset's samples, as it comes from a data worker."""
        made, _ = self.data.batch(weights, rows)
        task = self.task if task is None else task
        transformed: Batch = task.batch_transform()(made)
        return transformed

    @property
    def pair(self) -> tuple[int, int]:
        """Two samples that one batch can have.

        Raises:
            NotApplicable: the dataset takes one sample a batch, or has only one.
        """
        if self.data.rows < 2:
            raise NotApplicable("the dataset it is tested with has one sample a batch")
        return (0, 1)

    def loss(self, batch: Batch, task: Any = None, step: int = 0, stray: int = 0) -> Loss:
        """The loss of a batch, computed as the loop computes it.

        Args:
            batch: from `batch`.
            task: None: that of all checks.
            step: of the training.
            stray: seed of the process's own generators.
        """
        task = self.task if task is None else task
        if isinstance(task, SupportsBeginStep):
            task.begin_step(step)
        with seeded(Randomness(SEED).at("model", stray)):
            with torch.no_grad():
                inputs = task.prepare(batch.to(torch.device("cpu")), Randomness(SEED))
            return loss_of(task, inputs)

    def evaluation(self, batch: Batch, task: Any = None, stray: int = 0) -> Evaluation:
        """The evaluation of a batch, as the validator asks for it; `stray` as in `loss`."""
        task = self.task if task is None else task
        with torch.no_grad(), seeded(Randomness(SEED).at("stray", stray)):
            found: Evaluation = task.evaluate(batch.to(torch.device("cpu")), Randomness(SEED), _QUANTILES)
        return found


def modules(probe: TaskProbe) -> None:
    """`trainable` and `frozen` name parts of the task, which are built without memory."""
    task = probe.on_meta()
    probe.expect(task.trainable, "`trainable` is empty: the task trains nothing", hint="name its modules")
    for name in task.trainable:
        try:
            module = task.get_submodule(name)
        except AttributeError:
            module = None
        probe.expect(
            isinstance(module, nn.Module),
            f"`trainable` names {name!r}, which is no module of the task",
            accepted=", ".join(n for n, _ in task.named_children()) or "modules assigned to the task",
        )
        real = [key for key, tensor in module.state_dict().items() if not tensor.is_meta]
        probe.expect(
            not real,
            f"{name}.{real[:1] and real[0]} has memory, though the task was built on the meta device",
            accepted="tensors on the default device: each rank gets only its shards",
            hint="name no device in constructors, and fill tensors in init_weights",
        )
    for name in task.frozen:
        probe.expect(
            isinstance(getattr(task, name, None), Frozen),
            f"`frozen` names {name!r}, which is no frozen component of the task",
            accepted="components with `missing_files`, and `load` or `build_empty`",
        )


def initialisation(probe: TaskProbe) -> None:
    """Every tensor of the trained modules is filled, and equal seeds give equal weights."""
    first, second = _state(probe.ready()), _state(probe.ready())
    different = [name for name in first if not torch.equal(first[name], second[name])]
    probe.expect(not different, f"equal seeds give different weights: {', '.join(different[:8])}")
    unset = [name for name, t in first.items() if t.is_floating_point() and not t.isfinite().all()]
    probe.expect(not unset, f"{', '.join(unset[:8])} contains NaN or infinity after the initialisation")


def accepts_its_data(probe: TaskProbe) -> None:
    """`check` accepts the options of the dataset that the task is tested with."""
    options = probe.data.probe.config.options
    try:
        probe.on_meta().check(options)
    except MMError as error:
        probe.expect(False, f"check refuses the dataset that the task is tested with: {first_line(error)}")


def transforms(probe: TaskProbe) -> None:
    """The batch transform goes to data workers, without weights, and makes equal batches there."""
    transform = probe.task.batch_transform()
    rows = range(probe.data.rows)
    here = transform(probe.data.batch((), rows)[0])
    there = probe.probe.in_worker("what batch_transform returns", transform)(probe.data.batch((), rows)[0])
    probe.expect(isinstance(here, Batch), f"the batch transform returned a {type(here).__name__}", "a Batch")
    probe.expect(
        equal(here, there), "the batch transform makes another batch in a data worker", hint="keep no state"
    )


def loss(probe: TaskProbe) -> None:
    """The loss is a finite float32 sum with a gradient, and its metrics and bins have none."""
    found = probe.loss(probe.batch(range(probe.data.rows)))
    probe.expect(
        found.total.dtype == torch.float32,
        f"the loss is of {found.total.dtype}, in which sums over ranks lose digits",
        accepted="torch.float32",
        hint="compute the loss from `predicted.float()`",
    )
    probe.expect(found.total.isfinite(), f"the loss is {float(found.total.detach())}")
    others = {**found.metrics, **({} if found.bins is None else {"bins": found.bins})}
    for name, value in others.items():
        probe.expect(
            isinstance(value, Tensor) and not value.requires_grad,
            f"`{name}` of the loss holds the graph of the forward"
            if isinstance(value, Tensor)
            else f"`{name}` of the loss is a {type(value).__name__}",
            accepted="a detached tensor",
            hint="detach it: its memory is needed for the next micro-batch",
        )


def weights(probe: TaskProbe) -> None:
    """The loss's weight is that of `weight(batch)`, and the sum of its samples' weights."""
    for given in ([1.0, 1.0], [0.5, 0.0]):
        batch = probe.batch(range(probe.data.rows), given[: probe.data.rows])
        before, after = probe.task.weight(batch), probe.loss(batch).weight
        probe.expect(
            isinstance(before, float | int) and _near(before, after),
            f"weight(batch) is {before}, and the weight of the batch's loss is {after}",
            accepted="the same number: ranks exchange weights before the forward",
        )
    rows = probe.pair
    alone = [probe.task.weight(probe.batch([row])) for row in rows]
    whole = probe.task.weight(probe.batch(rows))
    probe.expect(
        _near(whole, sum(alone)),
        f"the weight of two samples is {whole:g}, and those of each alone are {alone[0]:g} and {alone[1]:g}",
        accepted="their sum: the weight counts what the loss sums",
    )
    half = probe.task.weight(probe.batch(rows, [1.0, 0.0]))
    probe.expect(
        _near(half, alone[0]),
        f"the weight of a batch is {half:g} with a sample of weight 0, and {alone[0]:g} without it",
        hint="multiply by batch.sample_weights",
    )


def sums(probe: TaskProbe) -> None:
    """The loss of a batch is the sum of its samples' losses, each times its weight."""
    rows = probe.pair
    alone = [_total(probe.loss(probe.batch([row]))) for row in rows]
    whole = _total(probe.loss(probe.batch(rows)))
    kinds = ((sum(alone), "the sum"), (sum(alone) / 2, "the mean"), (alone[0], "that of the first sample"))
    wrong = next((words for value, words in kinds[1:] if _near(whole, value)), "another value")
    probe.expect(
        _near(whole, sum(alone)),
        f"the loss of two samples is {whole:.7g}, {wrong}; those of each alone are {alone[0]:.7g} and"
        f" {alone[1]:.7g}",
        accepted=f"their sum {sum(alone):.7g}, so that means over ranks and micro-batches are exact",
        hint="sum over the samples, and draw with `rng.normal(shape, name, *key)` for key in batch.keys;"
        " declare a loss that compares samples in expected_failures",
    )
    half = _total(probe.loss(probe.batch(rows, [0.5, 0.0])))
    probe.expect(
        _near(half, alone[0] / 2),
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
    fresh = probe.loss(probe.batch(rows), probe.ready()).total
    probe.expect(torch.equal(first, fresh), "a new task with equal weights gives another loss")


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
    without = [name for name, parameter in trained.items() if parameter.grad is None]
    probe.expect(
        trained and not without,
        f"the loss does not depend on {', '.join(without[:8])}" if trained else "no parameter is trained",
        accepted="a gradient for each parameter with requires_grad",
        hint="compute the loss from the parameters by differentiable functions (no `.data`, `.detach()`,"
        " `.item()`), or freeze what the loss does not need: `module.requires_grad_(False)`",
    )
    bad = [n for n, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()]
    probe.expect(not bad, f"gradients are not finite: {', '.join(bad[:8])}")
    known = {id(parameter) for parameter in trained.values()}
    strays = [n for n, p in task.named_parameters() if p.grad is not None and id(p) not in known]
    probe.expect(
        not strays,
        f"{', '.join(strays[:8])} gets a gradient, and is not trained",
        hint="call frozen components in `prepare`, or under torch.no_grad()",
    )


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
    rows = ("losses", _total(found)), ("weights", float(batch.sample_weights.sum()))
    for (name, wanted), row in zip(rows, found.bins.detach().double(), strict=True):
        probe.expect(
            _near(float(row.sum()), wanted),
            f"the {name} in the bins add up to {float(row.sum()):.7g}",
            accepted=f"{wanted:.7g}, as those of the batch",
        )


def evaluation(probe: TaskProbe) -> None:
    """An evaluation has a loss for each row, equal each time, and leaves the task as it is."""
    task, count = probe.ready(), probe.data.rows
    batch = probe.batch(range(count))
    before = {name: tensor.clone() for name, tensor in _state(task).items()}
    found = probe.evaluation(batch, task)
    probe.expect(
        isinstance(found, Evaluation) and "loss" in found.sums,
        "evaluate returned no loss" if isinstance(found, Evaluation) else f"evaluate returned {found!r}",
        accepted="Evaluation(sums={'loss': [B], ...}, weights=[B])",
    )
    for name, tensor in {**found.sums, "weights": found.weights}.items():
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        probe.expect(
            shape == (count,) and tensor.dtype == torch.float32 and tensor.isfinite().all(),
            f"`{name}` of the evaluation is {tensor!r}",
            accepted=f"finite torch.float32 values of the shape ({count},), one a row",
        )
    for name, tensor in found.outputs.items():
        probe.expect(
            isinstance(tensor, Tensor) and len(tensor) == count,
            f"the output `{name}` of the evaluation does not have {count} rows",
        )
    again = probe.evaluation(batch, task, stray=1)
    different = [name for name in found.sums if not torch.equal(found.sums[name], again.sums[name])]
    probe.expect(
        not different,
        f"a second evaluation of the same rows gives another {', '.join(different)}",
        accepted="the same values in each evaluation of a run",
        hint="draw from `rng` and the rows' keys alone, and from no step or global generator",
    )
    changed = [name for name, tensor in _state(task).items() if not torch.equal(tensor, before[name])]
    probe.expect(not changed, f"evaluate changes {', '.join(changed[:4])} of the task's modules")
    if count > 1:
        _check_rows(probe, found, [probe.evaluation(probe.batch([row]), task) for row in range(count)])


def _check_rows(probe: TaskProbe, whole: Evaluation, alone: Sequence[Evaluation]) -> None:
    """Checks that the rows of an evaluation are those of each row alone."""
    for name, value in {**whole.sums, "weights": whole.weights}.items():
        single = [{**each.sums, "weights": each.weights}.get(name) for each in alone]
        probe.expect(
            all(one is not None for one in single),
            f"`{name}` is not in the evaluation of every batch",
            accepted="the same names for every batch",
        )
        for row, one in enumerate(single):
            probe.expect(
                one is not None and _near(float(value[row]), float(one[0])),
                f"`{name}` of row {row} is {float(value[row]):.7g} in a batch of {len(alone)} rows, and"
                f" {float(one[0] if one is not None else 0):.7g} alone",
                accepted="the same value: batches of an evaluation depend on the number of ranks",
                hint="return one value a row: no mean over the batch",
            )


def clips(probe: TaskProbe) -> None:
    """Sampled clips are those of their prompts, and depend on the seed and their number alone."""
    request = _request(probe)
    task = probe.ready()
    if isinstance(task, SupportsCheckRequest):
        try:
            task.check_request(request)
        except MMError as error:
            raise NotApplicable(f"the task samples no clips: {first_line(error)}") from error
    with torch.no_grad(), seeded(Randomness(SEED)):
        found = task.sample(request)
    probe.expect(
        [clip.prompt for clip in found] == list(request.prompts),
        f"sample returned clips of {[clip.prompt for clip in found]!r}",
        accepted=f"one clip for each of {list(request.prompts)!r}, in this order",
    )
    for clip in found:
        pixels = clip.pixels
        probe.expect(
            pixels.dim() == 4
            and len(pixels) == 3
            and pixels.dtype == torch.float32
            and pixels.device.type == "cpu"
            and bool((pixels.abs() <= 1).all()),
            f"the pixels of a clip are {list(pixels.shape)} of {pixels.dtype} on {pixels.device.type},"
            f" from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}",
            accepted="[3, F, Y, X] of torch.float32 on the CPU, from -1 to 1",
        )
        probe.expect(clip.fps > 0, f"a clip has {clip.fps} frames per second")
    last = len(request.prompts) - 1
    other = SampleRequest(**{**vars(request), "prompts": request.prompts[last:], "first": last})
    with torch.no_grad(), seeded(Randomness(SEED + 1)):
        (alone,) = task.sample(other)
    distance = float((alone.pixels - found[last].pixels).abs().max())
    probe.expect(
        distance <= 1e-3,
        f"the clip of {request.prompts[last]!r} differs by {distance:.2g} where it is sampled alone,"
        f" as number {last}",
        accepted="the same clip: ranks share a list of prompts",
        hint="draw the noise of clip i from Randomness(request.seed) and request.first + i alone",
    )


def _request(probe: TaskProbe) -> SampleRequest:
    """A request for two clips of the dataset's size."""
    batch = probe.batch(range(probe.data.rows))
    shape = batch.pixels.shape[2:] if isinstance(batch, VideoTextBatch) else (None, None, None)
    frames, height, width = shape
    return SampleRequest(
        ("a red circle", "a blue square"),
        seed=3,
        steps=2,
        num_frames=frames,
        height=height,
        width=width,
        fps=8.0,
    )


def _state(task: Any) -> dict[str, Tensor]:
    """The tensors of the trained modules."""
    return {
        f"{root}.{name}": tensor.detach()
        for root in task.trainable
        for name, tensor in task.get_submodule(root).state_dict().items()
    }


def _total(found: Loss) -> float:
    return float(found.total.detach())


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= _CLOSE * max(abs(first), abs(second), 1e-6)


KIT = Kit(
    by_name(
        *(modules, initialisation, accepts_its_data, transforms, loss, weights, sums, determinism),
        *(inputs_unchanged, gradients, bins, evaluation, clips),
    ),
    probe=TaskProbe,
)
"""The conformance checks of tasks."""
