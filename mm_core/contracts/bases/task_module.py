"""The base class of tasks: an author writes the loss of each sample, and the rest of the contract follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mm_core.contracts.batch import Batch, Bins, Clip, Evaluation, Loss, SampleRequest
from mm_core.contracts.components import Frozen
from mm_core.contracts.randomness import Randomness, seeded
from mm_core.contracts.running import Task
from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.calls import call_fault, call_text
from mm_core.plugin.checks.places import file_of, line_of, place_of


@dataclass
class TaskInputs:
    """What `TaskModule.prepare` returns and `TaskModule.loss` takes.

    Attributes:
        batch: the micro-batch on the device; its `sample_weights` are on the CPU.
        rng: source of the task's randomness.
    """

    batch: Any
    rng: Randomness


class TaskModule(nn.Module, Task):
    """The base class of tasks, and their type in annotations. Write `losses`, or `loss`; the rest may stay.

    A task need not derive from it: any `torch.nn.Module` that implements `Task` is one.

    Every module that is assigned to the task belongs to the engine, which shards the module, fills it (from
    files, or by its `init_weights`, or by its layers' `reset_parameters`) and trains its parameters, except
    those with `requires_grad_(False)`. A `Frozen` component (an autoencoder, a text encoder) has its own
    weights and is never trained. Parameters belong in modules, not in the task itself, and modules are called
    (`self.net(x)`), since sharded weights are complete only during a call.

    Attributes:
        input_dtype: dtype of the floating-point inputs of trained modules. The engine sets it: that in which
            it computes, whatever their weights are stored in. None: that of the weights.
    """

    input_dtype: torch.dtype | None = None

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the sub-modules that the engine fills and trains: all with tensors but `Frozen` ones.

        A subclass may set other names.

        Raises:
            ContractError: there is none, one has no forward, or the task itself has parameters or buffers.
        """
        if "trainable" in self.__dict__:
            names: tuple[str, ...] = self.__dict__["trainable"]
            return names
        self._refuse_own_tensors()
        found = tuple(
            name
            for name, module in self.named_children()
            if not isinstance(module, Frozen) and [*module.parameters(), *module.buffers()]
        )
        for name in found:
            if type(module := self.get_submodule(name)).forward is nn.Module.forward:
                raise self._fault(
                    f"{name} is a {type(module).__name__} without a forward: it is never called as a whole",
                    accepted="modules with a forward, since sharded weights are complete only during a call",
                    hint=f"assign the modules in {name} one by one, or write a module that calls them",
                )
        if not found:
            raise self._fault(
                "the task has nothing to train: no module with parameters was assigned to it",
                accepted="modules that are not Frozen components",
                hint="assign the trained module in __init__: self.net = ...",
            )
        return found

    @trainable.setter
    def trainable(self, names: tuple[str, ...]) -> None:
        self.__dict__["trainable"] = names

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the `Frozen` components that were assigned to the task. A subclass may set other names."""
        if "frozen" in self.__dict__:
            names: tuple[str, ...] = self.__dict__["frozen"]
            return names
        held = {**self._modules, **vars(self)}
        return tuple(name for name, value in held.items() if isinstance(value, Frozen))

    @frozen.setter
    def frozen(self, names: tuple[str, ...]) -> None:
        self.__dict__["frozen"] = names

    @property
    def bins(self) -> Bins | None:
        """The scale of `Loss.bins`: none, unless a subclass has one."""
        return None

    def losses(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Computes one loss for each sample: to be written as `losses(batch)` or `losses(batch, rng)`.

        Called once for each micro-batch, with gradients in training and without in an evaluation. Random
        numbers from `rng` along a sample's key, `rng.normal(shape, "noise", *key)` for `key` in `batch.keys`,
        do not depend on the number of ranks or micro-batches. What a `Frozen` component computes belongs
        under `torch.no_grad()`.

        Args:
            batch: what the dataset's `collate` and the task's `batch_transform` have made, on the device.
            args: nothing, or `rng`: a `Randomness`.
            kwargs: likewise.

        Returns:
            [B] floating point; the base class weights them by `Batch.sample_weights` and sums them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method losses")

    def loss(self, inputs: Any) -> Loss:
        """The weighted sum of `losses`. Override it for a loss that needs the whole batch.

        Args:
            inputs: `TaskInputs`.

        Raises:
            ContractError: `losses` returned something else than one loss for each sample.
        """
        losses = self._losses(inputs)
        weights = inputs.batch.sample_weights.to(losses.device, torch.float32, non_blocking=True)
        return Loss((losses.float() * weights).sum(), self.weight(inputs.batch))

    def weight(self, batch: Batch) -> float:
        """The weight of a micro-batch: the sum of its sample weights.

        Raises:
            ContractError: a weight is negative or not finite.
        """
        weights = batch.sample_weights
        if bool(((weights < 0) | ~weights.isfinite()).any()):
            raise self._fault(
                f"the batch has the sample weights {[round(weight, 6) for weight in weights.tolist()]}",
                of=None,
                accepted="finite weights of 0 or more",
                hint="check the weights that the dataset's collate and the task's batch_transform set",
            )
        return float(weights.sum())

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """The function that data workers apply to a batch after collate: none, the batch stays as it is."""
        return _unchanged

    def prepare(self, batch: Batch, rng: Randomness) -> Any:
        """Passes a micro-batch on to `loss`. Called without gradients.

        Args:
            batch: the micro-batch, on the device.
            rng: root of the run's randomness.
        """
        return TaskInputs(batch, rng)

    def evaluate(self, batch: Batch, rng: Randomness, quantiles: Sequence[float]) -> Evaluation:
        """The loss of held-out samples, without gradients, with the same random numbers in every evaluation.

        A task that overrides `loss` gets the loss of the whole micro-batch for each of its samples.

        Args:
            batch: the held-out samples.
            rng: root of the run's randomness.
            quantiles: not used.
        """
        fixed = rng.at("evaluation")
        keys = [number for key in batch.keys for number in key]
        with torch.no_grad(), seeded(fixed.at("draws", *keys)):
            inputs = self.prepare(batch, fixed)
            if type(self).loss is TaskModule.loss:
                losses = self._losses(inputs)
            else:
                whole = self.loss(inputs)
                losses = (whole.total / max(whole.weight, 1e-30)).expand(len(batch))
        weights = batch.sample_weights.to(losses.device, torch.float32)
        return Evaluation({"loss": losses.float() * weights}, weights)

    def sample(self, request: SampleRequest) -> list[Clip]:
        """Generates no clips: a task that does overrides it.

        Raises:
            ContractError: always.
        """
        self._refuse_samples()

    def check_request(self, request: SampleRequest) -> None:
        """Checks a request to sample clips, before any work.

        Raises:
            ContractError: the task has no method `sample` of its own.
        """
        if type(self).sample is TaskModule.sample:
            self._refuse_samples()

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """Checks nothing: batches are known with the first one."""

    @classmethod
    def author_faults(cls) -> list[str]:
        """Members that a subclass lacks, or has with other arguments; each derived task is checked."""
        if cls.losses is TaskModule.losses:
            written = cls.loss is not TaskModule.loss
            return [] if written else ["it has neither losses(batch) nor loss(inputs): write one of them"]
        given = {"rng": None} if _names_rng(cls.losses) else {}
        fault = call_fault(cls.losses, [None, None], given)
        if fault is None:
            return []
        takes = [*inspect.signature(cls.losses).parameters.values()][1:]
        passed = [inspect.Parameter("batch", inspect.Parameter.POSITIONAL_ONLY)]
        passed += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given]
        return [call_text("losses", takes, passed, False, line_of(cls.losses, file_of(cls)))]

    def _losses(self, inputs: object) -> Tensor:
        """One loss for each sample, checked."""
        if not isinstance(inputs, TaskInputs):
            raise self._fault(
                f"prepare returned a {type(inputs).__name__}, which the loss of TaskModule does not know",
                of="prepare",
                accepted="TaskInputs, as the prepare of TaskModule returns it",
                hint="end prepare with `return super().prepare(batch, rng)`, or override loss too",
            )
        batch = inputs.batch
        found = self.losses(batch, rng=inputs.rng) if _names_rng(type(self).losses) else self.losses(batch)
        what = _wrong_losses(found, len(batch))
        if what is not None:
            raise self._fault(
                f"losses returned {what}",
                of="losses",
                accepted=f"one loss a sample: a floating-point tensor of the shape [{len(batch)}]",
                hint="take no mean or sum over the samples: the task weights and sums their losses itself",
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise self._fault(
                "losses returned a tensor without a gradient",
                of="losses",
                accepted="losses that are computed from the parameters by differentiable functions",
                hint="use no detach(), item(), argmax() or no_grad() between the trained module and the loss",
            )
        return found

    def _refuse_own_tensors(self) -> None:
        """ContractError if the task itself has parameters or buffers: the engine fills only modules."""
        if own := [*self._parameters, *self._buffers]:
            raise self._fault(
                f"{', '.join(own)} belongs to the task itself, and only modules are trained",
                accepted="parameters and buffers of modules that are assigned to the task",
                hint=f"put it in a module: self.net.{own[0]} = nn.Parameter(...) in that module's __init__",
            )

    def _refuse_samples(self) -> NoReturn:
        raise self._fault(
            f"the task {type(self).__name__} makes no clips",
            accepted="a task with a method sample(request) that returns one clip for each prompt",
            hint="write it, or remove validation.samples; `mm sample` prints answers of models of text",
        )

    def _fault(
        self, what: str, *, of: str | None = None, accepted: str | None = None, hint: str | None = None
    ) -> ContractError:
        """An error at the author's class, or at one of its methods."""
        found: Any = type(self) if of is None else getattr(type(self), of)
        return ContractError(what, where=place_of(found, found), accepted=accepted, hint=hint)


def loss_of(task: Task, inputs: Any) -> Loss:
    """The loss of any task, checked: an author may have written `loss`.

    Args:
        task: the task.
        inputs: what its `prepare` returned.

    Raises:
        ContractError: `loss` returned something else than a sum with its weight.
    """
    found = task.loss(inputs)
    if (what := _wrong_loss(found)) is None:
        return found
    raise ContractError(
        f"loss returned {what}",
        where=place_of(type(task).loss, type(task).loss),
        accepted="Loss(total, weight): the sum of the losses as a scalar tensor, and its weight",
    )


def _wrong_loss(found: object) -> str | None:
    """What `loss` returned if it is not a sum with its weight; None if it is."""
    if not isinstance(found, Loss):
        return f"a {type(found).__name__}, not a Loss"
    total: object = found.total
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        form = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        return f"a Loss whose total is not a floating-point scalar, but {form}"
    if torch.is_grad_enabled() and not total.requires_grad:
        return "a Loss whose total has no gradient"
    return None if 0 <= found.weight < float("inf") else f"a Loss with the weight {found.weight}"


def _unchanged(batch: Batch) -> Batch:
    return batch


def _names_rng(losses: Callable[..., Tensor]) -> bool:
    """Whether the author's `losses` has a parameter `rng`."""
    return "rng" in inspect.signature(losses).parameters


def _wrong_losses(found: object, samples: int) -> str | None:
    """What `losses` returned if it is not one loss for each sample; None if it is."""
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}, not a tensor"
    if tuple(found.shape) != (samples,):
        return f"a tensor of the shape {list(found.shape)} for {plural(samples, 'sample')}"
    return None if found.is_floating_point() else f"a tensor of the dtype {found.dtype}"
