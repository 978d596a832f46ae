"""Protocols of the running side: dataset, video reader, task, engine, LR schedule, tracker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.contracts.batch import Batch, Bins, Clip, Evaluation, Loss, SampleRequest
from mm_core.contracts.data import Ending
from mm_core.contracts.randomness import Randomness


class Task(Protocol):
    """What a step computes. A `torch.nn.Module` whose sub-modules carry the names below. `prepare`,
    `evaluate` and `sample` call each entry point of a `Streamed` component equally often for every batch or
    request of one length: other ranks, which may hold a part of its weights, call theirs at the same time."""

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]

    @property
    def bins(self) -> Bins | None:
        """The scale that `Loss.bins` counts along; None for a task without one."""

    def weight(self, batch: Batch) -> float:
        """The weight of a micro-batch, from the batch alone, before any forward."""

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """What data workers apply after collate (tokenizing); picklable and free of weights."""

    def prepare(self, batch: Batch, rng: Randomness) -> Any:
        """Encodes (no grad), draws noise and timesteps. `rng` is the run's root: (seed)."""

    def loss(self, inputs: Any) -> Loss:
        """Forward and loss as a SUM; its weight equals `weight(batch)`."""

    def evaluate(self, batch: Batch, rng: Randomness, quantiles: Sequence[float]) -> Evaluation:
        """Loss of held-out samples, called under no_grad in evaluation mode, with fixed noise: all
        chance comes from `rng` and the samples' indices, never from a step. A diffusion task takes
        the timesteps that lie at `quantiles` of its training density. Every batch runs the same
        number of forwards, since other ranks run theirs at the same time."""

    def sample(self, request: SampleRequest) -> list[Clip]:
        """Generates; called under no_grad with all modules on the device."""

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """ContractError when the components do not fit each other or the data's fields
        (`batch_spec`: the training dataset's config fields). Called when the plan is made."""


class TaskModule(nn.Module, Task):
    """What annotations call a task: a module, and a `Task`. Nothing needs to be derived from it."""


@runtime_checkable
class SupportsBeginStep(Protocol):
    """A task that has a choice of its own for each step, made from (seed, step)."""

    def begin_step(self, step: int) -> None:
        """The micro-batches that follow are those of `step` (from 0). Called on every rank."""


@runtime_checkable
class SupportsCheckRequest(Protocol):
    """A task that can say before any training whether it will be able to sample."""

    def check_request(self, request: SampleRequest) -> None:
        """ContractError for what `sample` would refuse."""


@runtime_checkable
class SupportsNotes(Protocol):
    """A task that has chosen something that its user may not expect."""

    def notes(self) -> Sequence[str]:
        """A line for each, told before the first step. ContractError for a user's choice that cannot be."""


@runtime_checkable
class SupportsClips(Protocol):
    """A task that gives each clip as soon as it is made: the next ones need no memory beside it."""

    def clips(self, request: SampleRequest) -> Iterator[Clip]:
        """What `sample` returns, in its order. Every rank takes all of them, since the others wait for it."""


class LRSchedule(Protocol):
    """A factor of the base learning rate."""

    def factor(self, step: int) -> float:
        """The factor for the 0-based `step`."""


class Tracker(Protocol):
    """Receives metrics on rank 0. A tracker that fails is reported once and switched off."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics by name, after `step` steps; names may hold slashes (`validation/loss`)."""

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Clips that were sampled after `step` steps; their mp4 files lie in `folder`. `clips` holds
        previews: full length, at most 256 pixels a side."""

    def close(self, ending: Ending) -> None:
        """The process ends, and this is how."""


class Metric(Protocol):
    """A figure of held-out samples, exact over ranks: only sums leave a rank.

    For one evaluation the core calls `reset`, then `batch` for each batch of this rank and `sampled`
    for the clips that this rank has sampled, adds `sums` over the ranks, and gives all ranks
    `result`.
    """

    def reset(self) -> None: ...

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Looks at one evaluated batch; rows whose `batch.sample_weights` is 0 are to be left out."""

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Looks at sampled clips."""

    def sums(self) -> Tensor:
        """[n] float64 on CPU: what this rank has summed up; n never changes."""

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """The figures by name, from the sums over all ranks; {} when nothing was seen."""


class Callback:
    """An observer of a run, on every rank. Override what you need; each method does nothing here.

    Observers are called in the order of the YAML's `callbacks`. They watch and never change the run:
    an exception of theirs ends it, with their name.
    """

    def run_started(self, run_dir: Path, step: int, last_step: int) -> None:
        """Everything is ready; `step` steps were taken before."""

    def step_ended(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """`step` steps are taken. metrics: what was logged, on steps that log; else None."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended, with the same metrics on every rank."""

    def sampled(self, step: int, folder: Path) -> None:
        """Clips were written to `folder`."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete, under its final name."""

    def run_ended(self, step: int, error: BaseException | None) -> None:
        """The run is over after `step` steps; `error` is what ended it, None where all is well."""


class WeightPlan(Protocol):
    """Weights that a task begins with, other than at random: found, and compared with the task by name."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers, by path in the task, that need no initialisation: `fill` fills them,
        but for those that a checkpoint brings later, with the rest of its state."""

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fills them in place, in a state of the same names; each rank its shards. Called by all ranks."""


class InitialWeights(Protocol):
    """Where the weights of components begin that are given their memory one after another."""

    def covers(self, state: Mapping[str, Tensor]) -> WeightPlan:
        """What is there for the names of `state`: parameters and buffers by path in the task. Called by all
        ranks. An MMError for weights that do not fit."""


@dataclass(frozen=True)
class FrozenPlan:
    """Where the weights of a frozen component lie.

    blocks: module paths that are gathered or moved one at a time. device_bytes, host_bytes: what a rank
    keeps. call_bytes: what is whole on the device at most during a call, where that is more than what it
    keeps; else 0.
    """

    name: str
    placement: str
    blocks: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    call_bytes: int


@dataclass(frozen=True)
class EnginePlan:
    """How an engine spreads a task, decided on meta modules, before anything is allocated.

    world: ranks. data_parallel: ranks that see different samples. mesh: dimension name -> size.
    wrapped, recomputed, ignored: module paths, in order. The bytes are a rank's largest share,
    without activations. frozen: the frozen components whose size is known. offloaded_bytes: of the
    parameters' bytes, those in host memory; above 0, all gradients and optimizer states lie there too.
    gathered_bytes: copies of parameters that are whole on the device at most, at a time.
    """

    world: int
    data_parallel: int
    mesh: Mapping[str, int]
    wrapped: tuple[str, ...]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    frozen: tuple[FrozenPlan, ...] = ()
    offloaded_bytes: int = 0
    gathered_bytes: int = 0


class Engine(Protocol):
    """Owns the trainable modules, their gradients and the optimizer."""

    device: torch.device

    def plan(self, task: TaskModule, world: int, optimizer_state_tensors: float) -> EnginePlan:
        """Decides the layout for `world` ranks from a task built on meta; touches no device."""

    def prepare(
        self,
        task: TaskModule,
        plan: EnginePlan,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None,
        rng: Randomness,
        weights: WeightPlan | None = None,
    ) -> None:
        """Recompute -> shard -> materialise -> initialise, and fill from `weights` what they name ->
        optimizer, in place. `optimizer` is given the (sharded) parameters that require a gradient, by
        their path in the task; None: nothing will be trained. A parameter group may hold `lr_scale`, a
        factor of its base rate."""

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None:
        """Gives the task's `Streamed` components, built empty, their memory as planned, and fills them, one
        after another. Called by all ranks, before `prepare`."""

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """Runs `compute` in the engine's contexts and back-propagates `total * scale`; gradients
        are reduced over ranks on the last micro-batch. A loss that is not finite makes the gradients,
        and so the norm on every rank, not finite. Returns the loss, detached."""

    def grad_norm(self) -> float:
        """The global L2 norm of the reduced gradients, the same on all ranks. The step's one host sync."""

    def step(self, norm: float, clip_grad_norm: float | None) -> None:
        """Clips gradients of that norm, updates, clears them."""

    def discard(self) -> None:
        """Clears the gradients without an update."""

    @property
    def base_lr(self) -> float:
        """The base rate of the first parameter group that has no `lr_scale`."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients for the length of the block, entered by all ranks. What it
        gathered is dropped at its end, so that weights that change afterwards are gathered anew."""

    def scale_lr(self, factor: float) -> float:
        """Sets every parameter group's rate to its base rate times `factor`; returns the first's."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by their path in the task."""

    def state_dict(self) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...}: tensors only, by name, for DCP."""

    def state_template(self, stepped: Collection[str]) -> dict[str, Any]:
        """Like `state_dict`, with the optimizer's tensors made for the parameters that it has `stepped`,
        by their path in the task: DCP loads into it in place."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
