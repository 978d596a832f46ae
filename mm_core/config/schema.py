"""The schema of a run: frozen dataclasses, the one home of every default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.plugin.fields import ComponentConfig, Kind, Range


@dataclass(frozen=True)
class RunSection:
    """Where the run lives and what its randomness derives from."""

    name: str  # the run's folder under `dir`
    dir: str = "runs"  # folder of runs
    seed: int = 1234  # everything random in the run derives from it


@dataclass(frozen=True)
class LoaderSection:
    """How samples reach the step."""

    mode: Literal["sampler"] = "sampler"  # map-style datasets, read in the sampler's order
    sampler: Literal["random", "sequential"] = "random"  # order within an epoch
    workers: Annotated[int, Range(ge=0)] = 2  # reader processes a rank; 0 reads in the training process
    prefetch: Annotated[int, Range(ge=1)] = 2  # micro-batches each worker keeps ready
    drop_last: bool = True  # false: the last batch of an epoch is ragged, and still exact
    pin_memory: bool = True  # page-locked batches, where there is an accelerator
    max_failed_share: Annotated[float, Range(ge=0, le=1)] = 0.1  # of samples that may be unreadable


@dataclass(frozen=True)
class DataSection:
    """What is read."""

    train: Annotated[ComponentConfig, Kind("dataset")]
    loader: LoaderSection = field(default_factory=LoaderSection)


@dataclass(frozen=True)
class TrainSection:
    """How long, how much a step, how far a step."""

    steps: Annotated[int, Range(ge=0)]  # optimizer steps in all
    micro_batch_size: Annotated[int, Range(ge=1)] = 1  # samples a forward on one rank
    global_batch_size: Annotated[int, Range(ge=1)] | None = (
        None  # samples a step over all ranks; none: no accumulation
    )
    clip_grad_norm: Annotated[float, Range(gt=0)] | None = 1.0  # global L2 norm; none: only measured

    def __post_init__(self) -> None:
        size, micro = self.global_batch_size, self.micro_batch_size
        if size is not None and size % micro:
            raise ValueError(f"global_batch_size {size} is not a multiple of micro_batch_size {micro}")


@dataclass(frozen=True)
class CheckpointSection:
    """When state is saved and how much of it is kept. The last step is always saved."""

    every: Annotated[int, Range(ge=1)] = 1000  # steps
    keep: Annotated[int, Range(ge=1)] = 3  # newest complete checkpoints that stay


@dataclass(frozen=True)
class LogSection:
    """What is written while training."""

    every: Annotated[int, Range(ge=1)] = 1  # steps
    trackers: tuple[Annotated[ComponentConfig, Kind("tracker")], ...] = ()  # beside metrics.jsonl


@dataclass(frozen=True)
class PluginsSection:
    """Plugins of this run that are not installed."""

    path: tuple[str, ...] = ()  # one-file plugins, relative to this file; namespace `local/`


@dataclass(frozen=True)
class RunConfig:
    """A run, checked and complete."""

    run: RunSection
    task: Annotated[ComponentConfig, Kind("task")]
    data: DataSection
    train: TrainSection
    engine: Annotated[ComponentConfig, Kind("engine")] = ComponentConfig("engine", "core/fsdp2")
    optimizer: Annotated[ComponentConfig, Kind("optimizer")] = ComponentConfig("optimizer", "core/adamw")
    lr_schedule: Annotated[ComponentConfig, Kind("lr_schedule")] = ComponentConfig(
        "lr_schedule", "core/constant"
    )
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    plugins: PluginsSection = field(default_factory=PluginsSection)
    literals: Mapping[str, str] = field(default_factory=dict, compare=False, metadata={"yaml": False})
    """Dotted key -> the `${oc.env:..}` text that stood there; what is written keeps the text."""
