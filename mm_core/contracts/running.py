"""Protocols of task, engine, learning-rate schedule, tracker, metric, callback and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from mm_core.contracts.batch import Batch, Bins, Clip, Evaluation, Features, Loss, SampleRequest
from mm_core.contracts.data import Ending
from mm_core.contracts.randomness import Randomness


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


@dataclass(frozen=True)
class CachePart:
    """One kind of features that frozen components of a task compute, stored apart from the others.

    Attributes:
        name: such as `latents`.
        components: names of the frozen components that compute them: attributes of the task and keys of its
            config.
        of: `media`: of a sample; `text`: of a caption or prompt.
        settings: plain values besides the components' own, on which the features depend.
        texts: of a part of texts, those that every batch needs, such as the empty caption.
        fields: of a part of media, the samples' fields beside the clip on which it depends.
        caption: of a part of media, whether it depends on the caption too.
    """

    name: str
    components: tuple[str, ...]
    of: Literal["media", "text"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    caption: bool = False


@runtime_checkable
class SupportsCache(Protocol):
    """Capability of a task whose frozen features can be cached: it then trains on `FeatureBatch` too.

    `prepare` and `evaluate` accept a `FeatureBatch` in the place of a batch of the dataset, and compute the
    same from it without calling the components of its parts. `batch_transform` never gets one.
    """

    def cache_parts(self) -> tuple[CachePart, ...]:
        """The parts, in a fixed order; at most one is of texts."""

    def features(self, part: str, given: Batch | Sequence[str]) -> list[Features]:
        """The features of each sample of a batch, or of each text; called without gradients.

        A row's features do not depend on the other rows.

        Args:
            part: name of the part.
            given: a batch as the dataset's `collate` has made it, on the device; for a part of texts, texts.
        """

    def use_texts(self, find: Callable[[str], Features | None]) -> None:
        """Has `sample` ask `find` for the features of a prompt before it calls a text encoder."""


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
    over the same folder, which adds to what was logged before.
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

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Updates the parameters of all groups that have a gradient, in place; the result is ignored."""
