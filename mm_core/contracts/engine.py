"""Protocols of engines: plans of sharding and memory, initial weights, training of a task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.contracts.batch import Loss
from mm_core.contracts.randomness import Randomness
from mm_core.schema.fields import ComponentConfig

if TYPE_CHECKING:
    from mm_core.contracts.bases.task_module import TaskModule


class WeightPlan(Protocol):
    """Initial weights that were found for a task and compared with it by name."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers, by path in the task, that need no random initialisation.

        `fill` fills them, except those that a checkpoint loads later with the rest of its state.
        """

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fills a state with initial weights in place; called by all ranks.

        A state has all of the names, or some at a time: where the weights are quantised as they are read.
        """


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
        placement: replicated, sharded, offloaded or streamed.
        blocks: module paths that are gathered or moved one at a time.
        device_bytes: what a rank keeps on its device.
        host_bytes: what a rank keeps in host memory.
        call_bytes: largest size of gathered weights on the device during a call, if more than `device_bytes`;
            else 0.
        keep: of a streamed base, the blocks on the device besides the one in use.
    """

    name: str
    placement: str
    blocks: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    call_bytes: int
    keep: int = 0


@dataclass(frozen=True)
class EnginePlan:
    """How an engine spreads a task over ranks, decided on meta modules before anything is allocated.

    Bytes are the largest share of any rank, without activations.

    Attributes:
        world: number of ranks.
        data_parallel: number of shares of the data (`DataRanks.count`).
        mesh: dimension name -> size.
        recomputed: paths of modules whose activations are recomputed.
        ignored: paths of modules that the engine leaves as they are: not sharded, not cast.
        parameter_bytes: trained parameters.
        gradient_bytes: their gradients.
        optimizer_bytes: state of the optimizer.
        frozen: frozen components whose size is known.
        base: the frozen weights of trained components that are streamed, which are not in `parameter_bytes`;
            None for none.
        offloaded_bytes: the part of `parameter_bytes` in host memory; above 0, all gradients and optimizer
            states are there too.
        optimizer_on_host: whether the state of the optimizer, with copies of the trained parameters and their
            gradients, is in host memory, and `parameter_bytes` are not.
        gathered_bytes: largest size of gathered copies of parameters on the device at a time.
        compute_dtype: dtype in which trained modules compute; None for that of their weights.
        cast_inputs: paths of modules whose floating-point inputs are cast to `compute_dtype`.
        details: label -> paths of modules, to be shown with the plan.
        decided_by: label in `details` -> who decided, the model's plan or the config; empty if no trained
            component brings a plan.
    """

    world: int
    data_parallel: int
    mesh: Mapping[str, int]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    frozen: tuple[FrozenPlan, ...] = ()
    base: FrozenPlan | None = None
    offloaded_bytes: int = 0
    optimizer_on_host: bool = False
    gathered_bytes: int = 0
    compute_dtype: str | None = None
    cast_inputs: tuple[str, ...] = ()
    details: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[FrozenPlan, ...]:
        """The weights that are placed apart from the trained ones: the streamed base, frozen components."""
        return (self.base, *self.frozen) if self.base is not None else self.frozen


@dataclass(frozen=True)
class DataRanks:
    """Which share of the data a process reads. Processes that compute the same samples have the same share.

    Attributes:
        rank: number of the share.
        count: number of shares.
        leads: whether this process is the one of its share that counts and writes what all of them have. The
            leading processes are in the order of their shares.
    """

    rank: int = 0
    count: int = 1
    leads: bool = True


@dataclass(frozen=True)
class Shard:
    """What this rank holds of a trained parameter.

    Attributes:
        name: the parameter's path in the task.
        master: the memory on this rank that the optimizer updates: float32, or the parameter's dtype where
            the engine keeps no float32. The next forward computes with what is written into it.
        shape: shape of the whole parameter.
        stored: turns a tensor of `master`'s shape, of any dtype and device, into what a checkpoint stores, in
            the same memory. By default it is the tensor itself: `master` is the whole parameter.
    """

    name: str
    master: Tensor
    shape: tuple[int, ...]
    stored: Callable[[Tensor], Tensor] = lambda tensor: tensor


class Engine(Protocol):
    """An engine, which spreads a task over devices and owns its gradients and the optimizer.

    Attributes:
        device: of this process.
        data_ranks: which share of the data this process reads; known after `prepare`.
    """

    device: torch.device
    data_ranks: DataRanks

    def plan(
        self,
        task: TaskModule,
        world: int,
        optimizer_state_tensors: float,
        *,
        purpose: Literal["train", "sample", "import"] = "train",
    ) -> EnginePlan:
        """Plans how the engine spreads a task built on meta over `world` ranks; uses no device.

        Args:
            task: the task.
            world: number of ranks.
            optimizer_state_tensors: tensors of optimizer state per parameter.
            purpose: `sample` for a stored run that is sampled or evaluated: on any number of ranks, and in
                float32 on a CPU. `import` for weights that are stored as a checkpoint: nothing is computed,
                so what this host cannot compute is no error.
        """

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
            scale: factor of the loss before backward: number of shares of the data / total weight. The engine
                averages over the shares.
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
        """Within the block, the whole task is in evaluation mode without gradients; entered by all ranks.

        At its end, each module is in the mode that it had before.
        Gathered weights are dropped at its end, so that weights that change afterwards are gathered again.
        """

    def scale_lr(self, factor: float) -> float:
        """Sets every parameter group's learning rate to its base rate times `factor`; returns the first."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by their path in the task."""

    def shards(self) -> Iterator[Shard]:
        """This rank's share of each trained parameter, in the same order each time, without communication.

        Their memory may move between steps: what keeps an average of them asks anew each time.
        """

    def state_dict(self) -> dict[str, Any]:
        """The engine's state for a checkpoint: {"model": ..., "optimizer": ...}, tensors only, by name."""

    def state_template(self, stepped: Collection[str]) -> dict[str, Any]:
        """A state like `state_dict` for loading a checkpoint into it in place.

        Args:
            stepped: paths in the task of the parameters for which the optimizer has state.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingFacts:
    """What the config of a run fixes about its training, for an engine whose own settings repeat some of it.

    Attributes:
        steps: steps of the whole run.
        micro_batch_size: samples per micro-batch and share of the data.
        accumulation: micro-batches per step.
        shares: number of shares of the data.
        clip_grad_norm: L2 norm to which gradients are clipped; None without clipping.
        optimizer: qualified name of the optimizer (`core/adamw`) and its options.
        lr_schedule: qualified name of the learning-rate schedule and its options.
    """

    steps: int
    micro_batch_size: int
    accumulation: int
    shares: int
    clip_grad_norm: float | None
    optimizer: ComponentConfig
    lr_schedule: ComponentConfig


@runtime_checkable
class SupportsCheckTraining(Protocol):
    """Capability of an engine whose own settings repeat what the config of a run fixes elsewhere."""

    def check_training(self, facts: TrainingFacts) -> tuple[str, ...]:
        """Fills and checks such settings; called after `plan` and before `prepare`, not for sampling.

        Returns:
            Sentences for the user, shown with the plan and at the start of the run.

        Raises:
            MMError: a setting contradicts the run.
        """


@runtime_checkable
class SupportsOverflowed(Protocol):
    """Capability of an engine that scales losses, so that small gradients do not vanish in float16."""

    def overflowed(self) -> str | None:
        """Judges a gradient norm that is not finite; called by all ranks, before `discard`.

        Returns:
            A sentence if a lower scale may make the gradients finite: the scale is lowered, and the step is
            skipped. None if the gradients are at fault.
        """


@runtime_checkable
class SupportsUpdate(Protocol):
    """Capability of an engine whose device decides about an update, so that the host reads the norm later.

    Attributes:
        late: whether it is so for the optimizer and the device of this run.
    """

    late: bool

    def update(self, clip_grad_norm: float | None) -> Tensor:
        """Does what `grad_norm` and `step` do, without waiting for the device.

        Where the norm is not finite, no rank changes weights or optimizer state, nor at any later update
        until `settled`.

        Args:
            clip_grad_norm: largest norm after clipping; None: no clipping.

        Returns:
            The norm, [], on the device.
        """

    def settled(self) -> None:
        """The host has read the norms of all updates and has decided about them."""


@runtime_checkable
class SupportsStandIn(Protocol):
    """Capability of an engine whose step cannot run on tensors without memory: another one stands for it in a
    forecast."""

    def stand_in(self) -> Engine:
        """The other engine: of the same activations and communication, and with a `ShardedPlan`."""

    def buffers(self, plan: EnginePlan) -> Mapping[str, Mapping[str, int]]:
        """What a rank's device holds besides `plan`'s parameters, gradients and states, by what it is for.

        Args:
            plan: this engine's.

        Returns:
            Bytes by purpose, under `backward` and under `update`.
        """


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name in a config: `bf16` -> `torch.bfloat16`. See `DType`."""
    return _DTYPES[name]
