"""What the conformance checks of engines train: a small task, in the engine and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    DictBatch,
    EnginePlan,
    Loss,
    Randomness,
    SampleKey,
    TaskModule,
    empty_parameters,
    reset_parameters,
)
from mm_core.contracts.bases.task_module import loss_of
from mm_core.modules.full_tensors import keep_local_part
from mm_core.modules.shards import gathered
from mm_core.runtime.ranks import Ranks

Tensors = dict[str, Tensor]
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]

ROWS, LR, SCALE = 4, 0.05, 1.3
WEIGHTS = (1.0, 0.5, 2.0, 0.0)
"""The weights of the rows of a step, uneven as those of real batches."""

FROZEN = ("net.fixed.weight", "net.fixed.bias")
_SLOW_GROUP = ("net.head.weight", "net.scale")
_LR_SCALE = 0.5
_WIDTH = 7  # odd, so that the shards of two ranks differ


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class Net(nn.Module):
    """A trained module with blocks, a frozen layer, a scalar parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed = nn.Linear(5, _WIDTH), nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 3, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.shift: Tensor
        self.register_buffer("shift", torch.empty(_WIDTH))

    def init_weights(self) -> None:
        """Sets every parameter, and the buffer."""
        reset_parameters(self)
        nn.init.constant_(self.scale, SCALE)
        self.shift.copy_(torch.linspace(-1, 1, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B,5] to [B,3]."""
        x = self.fixed(self.first(x)) + self.shift
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = self.head(x) * self.scale
        return predicted


class Encoder(nn.Module):
    """A frozen component, which the core streams weights into (`mm_core.contracts.Streamed`)."""

    weights_from = None
    entry_points = ("encode",)
    block_patterns: tuple[str, ...] = ()

    def missing_files(self) -> list[str]:
        """No file is missing."""
        return []

    def build_empty(self) -> None:
        """Builds the layer, on the meta device."""
        if not hasattr(self, "layer"):
            with empty_parameters():
                self.layer = nn.Linear(4, 5)

    def encode(self, x: Tensor) -> Tensor:
        """Maps [B,4] to [B,5]."""
        hidden: Tensor = self.layer(x)
        return hidden


class TinyTask(TaskModule):
    """A squared error for each row, of what the network makes of encoded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.net = Encoder(), Net()

    def losses(self, batch: DictBatch) -> Tensor:
        """The error [B] of a batch of `batch_of`."""
        with torch.no_grad():
            hidden = self.encoder.encode(batch["x"])
        errors: Tensor = (self.net(hidden) - batch["y"]).square().mean(1)
        return errors

    def loss_of_rows(self, step: int, rows: slice = slice(ROWS), device: torch.device | str = "cpu") -> Loss:
        """The loss of rows of a step, computed as the training loop does."""
        batch = batch_of(step, rows).to(torch.device(device))
        with torch.no_grad():
            inputs = self.prepare(batch, Randomness(4))
        return loss_of(self, inputs)


def batch_of(step: int, rows: slice) -> DictBatch:
    """Rows of the global batch of a step."""
    rng = Randomness(3).at("rows", step)
    values = {name: rng.normal((ROWS, size), name)[rows] for name, size in (("x", 4), ("y", 3))}
    numbers = range(ROWS)[rows]
    keys = [SampleKey(0, step * ROWS + number) for number in numbers]
    return DictBatch(keys, torch.tensor(WEIGHTS[rows]), [f"row {n}" for n in numbers], values)


def task_on_meta() -> TinyTask:
    """A new task on the meta device."""
    with torch.device("meta"):
        task = TinyTask()
    task.encoder.build_empty()
    return task


class Values:
    """Tensors by path in the task, as initial weights of an engine (`WeightPlan` and `InitialWeights`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def names(self) -> Collection[str]:
        """The paths of the tensors."""
        return self.tensors.keys()

    def covers(self, state: Mapping[str, Tensor]) -> Values:
        """The values of a state's names."""
        return Values({name: value for name, value in self.tensors.items() if name in state})

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fills those of the state's tensors that have a value."""
        with torch.no_grad():
            for name, value in self.tensors.items():
                keep_local_part(state[name], value)


def drawn_values() -> Tensors:
    """A value for each tensor of the task, by path."""
    rng = Randomness(1)
    return {name: rng.normal(tuple(t.shape), name) / 2 for name, t in task_on_meta().state_dict().items()}


def network_values() -> Tensors:
    """Those of `drawn_values` that belong to the trained network."""
    return {name: value for name, value in drawn_values().items() if name.startswith("net.")}


def adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with two groups, the first of which has half the learning rate.

    Its `eps` is so large that a step grows with the gradient: faults of scale show.
    """
    slow = [parameter for name, parameter in named.items() if name in _SLOW_GROUP]
    rest = [parameter for name, parameter in named.items() if name not in _SLOW_GROUP]
    groups: list[dict[str, Any]] = [{"params": slow, "lr_scale": _LR_SCALE}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.1, eps=1.0, foreach=False)


class Plain:
    """The task in a loop of plain torch, in one process.

    Args:
        values: the task's tensors by path.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        self.task = task_on_meta().to_empty(device="cpu")
        self.task.load_state_dict({**drawn_values(), **(values or {})})
        named = dict(self.task.net.named_parameters(prefix="net"))
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        self.optimizer = adamw(self.parameters)

    def step(
        self, number: int, factor: float = 1.0, clip: float | None = None, micros: int = 1
    ) -> tuple[float, float]:
        """As `Trial.step`, in one batch; the norm is that before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = LR * factor * group.get("lr_scale", 1.0)
        loss = self.task.loss_of_rows(number)
        torch.autograd.backward(loss.total / loss.weight)
        largest = float("inf") if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), largest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.total.detach()), float(norm)

    def loss(self, number: int) -> float:
        """The loss of a step's rows, without training."""
        with torch.no_grad():
            return float(self.task.loss_of_rows(number).total)

    def weights(self) -> Tensors:
        """Copies of the trained parameters, by path in the task."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


class Trial:
    """The task in a new engine, on the ranks of the process group.

    Args:
        engine: the engine.
        make: makes the optimizer; None: nothing is trained.
        values: initial weights of the network; None: they are drawn at random.
        seed: of the random ones.
        task: another task, on meta, that has `loss_of_rows`.
    """

    def __init__(
        self,
        engine: Any,
        make: MakeOptimizer | None = adamw,
        values: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        task: Any = None,
    ) -> None:
        self.engine, self.task = engine, task_on_meta() if task is None else task
        self.ranks = Ranks.current()
        self.plan: EnginePlan = engine.plan(self.task, self.ranks.count, 2.0)
        engine.place_frozen(self.task, self.plan, Values(drawn_values()))
        weights = None if values is None else Values(values)
        engine.prepare(self.task, self.plan, make, Randomness(seed), weights)

    def compute(self, step: int, rows: slice = slice(ROWS)) -> Loss:
        """The loss of rows of a step, on the engine's device."""
        found: Loss = self.task.loss_of_rows(step, rows, self.engine.device)
        return found

    def backward(
        self, step: int, micros: int = 1, change: Callable[[int, Loss], Loss] = lambda _, loss: loss
    ) -> float:
        """Runs this rank's micro-batches of a step; returns the sum of their losses.

        Args:
            step: number of the step.
            micros: micro-batches over all ranks.
            change: makes another loss of that of a micro-batch, from its number over all ranks.
        """
        ranks, size = self.engine.data_ranks, ROWS // micros
        own = range(ranks.rank, micros, ranks.count)
        scale = ranks.count / sum(WEIGHTS)

        def forward(micro: int) -> Loss:
            return change(micro, self.compute(step, slice(micro * size, (micro + 1) * size)))

        made = (
            self.engine.micro_step(partial(forward, micro), last=micro == own[-1], scale=scale)
            for micro in own
        )
        return sum(float(loss.total.detach()) for loss in made)

    def step(
        self, number: int, micros: int = 1, factor: float = 1.0, clip: float | None = None
    ) -> tuple[float, float]:
        """Takes a training step as the loop does; returns the loss of this rank's rows and the norm.

        Args:
            number: number of the step.
            micros: micro-batches over all ranks.
            factor: multiplies the learning rates.
            clip: largest norm of the gradients; None: they are not clipped.
        """
        self.engine.scale_lr(factor)
        loss = self.backward(number, micros)
        norm = self.engine.grad_norm()
        self.engine.step(norm, clip)
        return loss, norm

    def loss(self, number: int) -> float:
        """The loss of a step's rows, evaluated by the engine."""
        with self.engine.evaluating():
            return float(self.compute(number).total)

    def model(self) -> Tensors:
        """The model's part of the engine's state, unsharded; called by all ranks."""
        return whole(self.engine.state_dict()["model"].items())

    def weights(self) -> Tensors:
        """Copies of the trained parameters, unsharded; called by all ranks."""
        return whole((name, p) for name, p in self.engine.named_parameters() if p.requires_grad)


def poisoned(at: int) -> Callable[[int, Loss], Loss]:
    """A change of losses: that of micro-batch `at` is NaN, with finite gradients."""

    def change(micro: int, loss: Loss) -> Loss:
        return Loss(loss.total + float("nan"), loss.weight) if micro == at else loss

    return change


def whole(tensors: Iterable[tuple[str, Tensor]]) -> Tensors:
    """Unsharded copies of tensors, on the CPU; called by all ranks."""
    return {name: gathered(tensor).cpu() for name, tensor in tensors}
