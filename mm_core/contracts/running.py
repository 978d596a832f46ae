"""Protocols of the running side: dataset, video reader, task, engine, LR schedule, tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.contracts.batch import Batch, Clip, Loss, SampleRequest
from mm_core.contracts.randomness import Randomness


@dataclass(frozen=True)
class VideoInfo:
    """What a container's header says. width, height in pixels after rotation; fps in 1/s (average);
    num_frames as declared or counted; duration in seconds."""

    width: int
    height: int
    fps: float
    num_frames: int
    duration: float


class VideoReader(Protocol):
    """Decodes chosen frames of a video file."""

    def probe(self, path: Path) -> VideoInfo:
        """Reads the header only. DataError for what is no readable video."""
        ...

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Frames shown at the given times -> uint8 [F,Y,X,3]. DataError for damaged files."""
        ...


class Dataset(Protocol):
    """Map-style samples: plain dicts. One that draws at random also is a RandomisedDataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. DataError when it can not be read: it is then skipped, counted and listed."""
        ...

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Samples -> batch. The loader has added `key` (SampleKey) and `weight` to each sample."""
        ...


@runtime_checkable
class RandomisedDataset(Protocol):
    """A dataset whose samples depend on chance (random start frame, crop, flip)."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """Like `__getitem__`, with all chance taken from `rng` (seed, "data", epoch, index)."""
        ...


class Task(Protocol):
    """What a step computes. A `torch.nn.Module` whose sub-modules carry the names below."""

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]

    def weight(self, batch: Batch) -> float:
        """The weight of a micro-batch, from the batch alone, before any forward."""
        ...

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """What data workers apply after collate (tokenizing); picklable and free of weights."""
        ...

    def prepare(self, batch: Batch, rng: Randomness) -> Any:
        """Encodes (no grad), draws noise and timesteps. `rng` is the run's root: (seed)."""
        ...

    def loss(self, inputs: Any) -> Loss:
        """Forward and loss as a SUM; its weight equals `weight(batch)`."""
        ...

    def sample(self, request: SampleRequest) -> list[Clip]:
        """Generates; called under no_grad with all modules on the device."""
        ...

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """ContractError when the components do not fit each other or the data's fields
        (`batch_spec`: the training dataset's config fields). Called when the plan is made."""
        ...


class LRSchedule(Protocol):
    """A factor of the base learning rate."""

    def factor(self, step: int) -> float:
        """The factor for the 0-based `step`."""
        ...


class Tracker(Protocol):
    """Receives metrics on rank 0. A tracker that fails is reported once and switched off."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EnginePlan:
    """How an engine spreads a task, decided on meta modules, before anything is allocated.

    world: ranks. data_parallel: ranks that see different samples. mesh: dimension name -> size.
    wrapped, recomputed, ignored: module paths, in order. The bytes are a rank's largest share,
    without activations.
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


class Engine(Protocol):
    """Owns the trainable modules, their gradients and the optimizer."""

    device: torch.device

    def plan(self, task: nn.Module, world: int, optimizer_state_tensors: int) -> EnginePlan:
        """Decides the layout for `world` ranks from a task built on meta; touches no device."""
        ...

    def prepare(
        self,
        task: nn.Module,
        plan: EnginePlan,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        rng: Randomness,
    ) -> None:
        """Recompute -> shard -> materialise -> initialise -> optimizer, in place."""
        ...

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """Runs `compute` in the engine's contexts and back-propagates `total * scale`; gradients
        are reduced over ranks on the last micro-batch. Returns the loss, detached."""
        ...

    def step(self, clip_grad_norm: float | None) -> float:
        """Clips, refuses a non-finite norm (TrainingError, before the update, on all ranks),
        updates, clears. Returns the global gradient norm before clipping."""
        ...

    def scale_lr(self, factor: float) -> float:
        """Sets every parameter group's rate to its base rate times `factor`; returns the first's."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by their path in the task."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...}: tensors only, by name, for DCP."""
        ...

    def state_template(self, stepped: bool) -> dict[str, Any]:
        """Like `state_dict`, with optimizer tensors made if training has `stepped`: DCP loads into
        it in place."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
