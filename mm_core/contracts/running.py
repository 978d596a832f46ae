"""Protocols of task, engine, learning-rate schedule, tracker, metric, callback and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.contracts.batch import Batch, Bins, Clip, Evaluation, Loss, SampleRequest
from mm_core.contracts.data import Ending
from mm_core.contracts.randomness import Randomness

if TYPE_CHECKING:
    from mm_core.contracts.bases.task_module import TaskModule


class Task(Protocol):
    """A task: a `torch.nn.Module` that computes the loss of a training step.

    `TaskModule` implements all of it but the loss.

    `prepare`, `evaluate` and `sample` call each entry point of a `Streamed` component equally often for every
    batch, or request of the same length: other ranks, which may hold a part of its weights, make their calls
    at the same time.

    Attributes:
        trainable: names of the sub-modules that are trained.
        frozen: names of the sub-modules that are not.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]

    @property
    def bins(self) -> Bins | None:
        """The scale of the task's `Loss.bins`, e.g. the noise level; None for a task without one."""

    def weight(self, batch: Batch) -> float:
        """The weight of a micro-batch in the loss, from the batch alone, before any forward."""

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """The function that data workers apply to a batch after collate (tokenizing).

        It must be picklable and have no weights.
        """

    def prepare(self, batch: Batch, rng: Randomness) -> Any:
        """Prepares the inputs of the task's loss: encodes the batch (no grad), draws noise and timesteps.

        Args:
            batch: the micro-batch.
            rng: root of the run's randomness (seed).
        """

    def loss(self, inputs: Any) -> Loss:
        """Runs the task's forward and returns the loss as a SUM; its weight equals `weight(batch)`."""

    def evaluate(self, batch: Batch, rng: Randomness, quantiles: Sequence[float]) -> Evaluation:
        """Computes the task's loss of held-out samples with fixed noise.

        Called under no_grad in evaluation mode. All randomness comes from `rng` and the samples' indices,
        never from a step. Every batch must run the same number of forwards, since other ranks run theirs at
        the same time.

        Args:
            batch: the held-out samples.
            rng: source of all randomness.
            quantiles: quantiles of the training density at which a diffusion task takes its timesteps.
        """

    def sample(self, request: SampleRequest) -> list[Clip]:
        """Generates clips; called under no_grad with all modules on the device."""

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """Checks that the task's components match each other and the data; called when the plan is made.

        Args:
            batch_spec: the config fields of the training dataset.

        Raises:
            ContractError: they do not match.
        """


@runtime_checkable
class SupportsBeginStep(Protocol):
    """Capability of a task that makes a choice for each step, from (seed, step)."""

    def begin_step(self, step: int) -> None:
        """Called on every rank when the task's next micro-batches belong to another step (from 0)."""


@runtime_checkable
class SupportsCheckRequest(Protocol):
    """Capability of a task that can check a sampling request before any training."""

    def check_request(self, request: SampleRequest) -> None:
        """Checks a sampling request.

        Raises:
            ContractError: `sample` would not accept it.
        """


@runtime_checkable
class SupportsNotes(Protocol):
    """Capability of a task that reports choices which its user may not expect."""

    def notes(self) -> Sequence[str]:
        """The task's notes, one line each, printed before the first training step.

        Raises:
            ContractError: the user's settings are not possible.
        """


@runtime_checkable
class SupportsClips(Protocol):
    """Capability of a task that yields each sampled clip as soon as it is finished, to save memory."""

    def clips(self, request: SampleRequest) -> Iterator[Clip]:
        """Yields the sampled clips, in the order of `sample`; every rank must consume all of them."""


class LRSchedule(Protocol):
    """A learning-rate schedule: a factor of the base learning rate for each step.

    The factor depends on the step alone, so that a resumed run continues the curve: a schedule keeps nothing
    between calls.
    """

    def factor(self, step: int) -> float:
        """The factor of the base learning rate at a step, counted from 0: finite and not below 0."""


class Tracker(Protocol):
    """A tracker, which receives metrics and clips on rank 0; after a failure it is disabled.

    It writes into the run's folder, and changes nothing that it receives. A resumed run builds a new tracker
    over the same folder: it adds to what was logged, and a step that comes again replaces the earlier one or
    is logged once more, as the destination allows.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics logged after `step` steps.

        Args:
            step: number of steps.
            metrics: values by name; names may contain slashes (`validation/loss`), values may be NaN or
                infinite.
        """

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Receives the clips sampled after `step` steps.

        Args:
            step: number of steps.
            clips: previews: full length, at most 256 pixels per side.
            folder: folder of the mp4 files.
        """

    def close(self, ending: Ending) -> None:
        """Closes the tracker when the run's process ends, with everything written; it may be called twice.

        Args:
            ending: how the process ends.
        """


class Metric(Protocol):
    """A metric of held-out samples, exact over ranks, since ranks exchange only sums.

    For one evaluation the core calls `reset`, then `batch` for each batch of this rank and `sampled` for the
    clips that this rank has sampled, adds `sums` over the ranks, and calls `result` on all ranks.
    """

    def reset(self) -> None: ...

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds one evaluated batch to the metric; rows whose `batch.sample_weights` is 0 must not count."""

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Adds sampled clips to the metric."""

    def sums(self) -> Tensor:
        """The metric's sums on this rank, [n] float64 on the CPU.

        n is equal on all ranks: it may follow from the shape of a batch, never from the values of its rows.
        """

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """The metric's values by name, from the sums over all ranks; {} if there were no samples."""


class Callback:
    """A callback at events of a run, on every rank. Override what you need: each method does nothing here.

    Callbacks are called in the order of the YAML's `callbacks`. They observe and must not change the run; an
    exception in a callback ends the run, with the callback's name in the message.
    """

    def run_started(self, run_dir: Path, step: int, last_step: int) -> None:
        """Called when a run is ready to train; `step` steps were taken before."""

    def step_ended(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Called after a training step; `metrics` are the logged ones, None if this step does not log."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, with the same metrics on every rank."""

    def sampled(self, step: int, folder: Path) -> None:
        """Called after sampled clips were written to a folder."""

    def saved(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete, under its final name."""

    def run_ended(self, step: int, error: BaseException | None) -> None:
        """Called when a run ends after `step` steps; `error` ended it, None if it ended without one."""


class Optimizer(Protocol):
    """A `torch.optim.Optimizer`, built with groups of parameters: `target(groups, **fields)`.

    All that it keeps between steps is tensors in `state` (a count is a 0-dimensional one), by parameter, and
    numbers in `param_groups`: so that a checkpoint contains it. The core calls `step` after the gradients of
    all micro-batches, and clears the gradients itself.
    """

    def step(self) -> object:
        """Updates the parameters of all groups that have a gradient, in place; the result is ignored."""


class WeightPlan(Protocol):
    """Initial weights that were found for a task and compared with it by name."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers, by path in the task, that need no random initialisation.

        `fill` fills them, except those that a checkpoint loads later with the rest of its state.
        """

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fills a state of the same names with initial weights in place; called by all ranks."""


class InitialWeights(Protocol):
    """The source of initial weights for components that receive their memory one after another."""

    def covers(self, state: Mapping[str, Tensor]) -> WeightPlan:
        """Finds the initial weights for parameters and buffers; called by all ranks.

        Args:
            state: parameters and buffers by path in the task.

        Raises:
            MMError: the weights do not match.
        """


@dataclass(frozen=True)
class FrozenPlan:
    """The plan for the weights of a frozen component.

    Attributes:
        name: the component's name in the task.
        placement: replicated, sharded or offloaded.
        blocks: module paths that are gathered or moved one at a time.
        device_bytes: what a rank keeps on its device.
        host_bytes: what a rank keeps in host memory.
        call_bytes: largest size of gathered weights on the device during a call, if more than `device_bytes`;
            else 0.
    """

    name: str
    placement: str
    blocks: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    call_bytes: int


@dataclass(frozen=True)
class EnginePlan:
    """How an engine spreads a task over ranks, decided on meta modules before anything is allocated.

    Bytes are the largest share of any rank, without activations.

    Attributes:
        world: number of ranks.
        data_parallel: number of ranks with different samples.
        mesh: dimension name -> size.
        wrapped: paths of modules that are gathered one at a time, in order.
        recomputed: paths of modules whose activations are recomputed.
        ignored: paths of modules that are not sharded.
        parameter_bytes: trained parameters.
        gradient_bytes: their gradients.
        optimizer_bytes: state of the optimizer.
        frozen: frozen components whose size is known.
        offloaded_bytes: the part of `parameter_bytes` in host memory; above 0, all gradients and optimizer
            states are there too.
        gathered_bytes: largest size of gathered copies of parameters on the device at a time.
        forward_prefetch: path of a wrapped module -> wrapped modules that are gathered while its forward
            computes.
        backward_prefetch: the same for the backward.
        decided_by: `wrapped`, `recomputed` and `prefetched` -> who decided, the model's plan or the config;
            empty if no trained component brings a plan.
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
    forward_prefetch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backward_prefetch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided_by: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """An engine, which spreads a task over devices and owns its gradients and the optimizer."""

    device: torch.device

    def plan(self, task: TaskModule, world: int, optimizer_state_tensors: float) -> EnginePlan:
        """Plans how the engine spreads a task built on meta over `world` ranks; uses no device."""

    def prepare(
        self,
        task: TaskModule,
        plan: EnginePlan,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None,
        rng: Randomness,
        weights: WeightPlan | None = None,
    ) -> None:
        """Prepares a task for training in place: recomputation, sharding, memory, weights, optimizer.

        Args:
            task: the task, on meta.
            plan: the engine's plan for it.
            optimizer: creates the optimizer from the (sharded) parameters that require a gradient, by their
                path in the task; None: nothing will be trained. A parameter group may contain `lr_scale`, a
                factor of its base learning rate.
            rng: source of random initialisation.
            weights: initial weights; parameters that they do not name are initialised at random.
        """

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None:
        """Gives a task's `Streamed` components their memory as planned and fills them, one after another.

        Called by all ranks before `prepare`, with the components built empty.
        """

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """Runs forward and backward of one micro-batch in the engine's contexts; returns the detached loss.

        A loss that is not finite makes the gradients not finite, and so the norm on every rank.

        Args:
            compute: the forward.
            last: this is the last micro-batch of the step, on which gradients are reduced over ranks.
            scale: factor of the loss before backward.
        """

    def grad_norm(self) -> float:
        """The global L2 norm of the gradients, equal on all ranks; the step's only host sync."""

    def step(self, norm: float, clip_grad_norm: float | None) -> None:
        """Clips the gradients, updates the trained weights with the optimizer, and clears the gradients.

        Args:
            norm: the gradients' norm.
            clip_grad_norm: largest norm after clipping; None: no clipping.
        """

    def discard(self) -> None:
        """Clears the gradients without an update of the weights."""

    @property
    def base_lr(self) -> float:
        """The base learning rate of the first parameter group without `lr_scale`."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the block, the engine is in evaluation mode without gradients; entered by all ranks.

        Gathered weights are dropped at its end, so that weights that change afterwards are gathered again.
        """

    def scale_lr(self, factor: float) -> float:
        """Sets every parameter group's learning rate to its base rate times `factor`; returns the first."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by their path in the task."""

    def state_dict(self) -> dict[str, Any]:
        """The engine's state for a checkpoint: {"model": ..., "optimizer": ...}, tensors only, by name."""

    def state_template(self, stepped: Collection[str]) -> dict[str, Any]:
        """A state like `state_dict` for loading a checkpoint into it in place.

        Args:
            stepped: paths in the task of the parameters for which the optimizer has state.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
