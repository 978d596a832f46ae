"""The schema of a run: frozen dataclasses, the one home of every default."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.plugin.registry import Registry, get_registry
from mm_core.schema.fields import ComponentConfig, Guidance, Kind, Range


@dataclass(frozen=True)
class RunSection:
    """Where the run lives and what its randomness derives from."""

    name: str  # the run's folder under `dir`
    dir: str = "runs"  # folder of runs
    seed: int = 1234  # everything random in the run derives from it
    deterministic: bool = False  # refuse kernels whose results vary; slower
    stuck_after: Annotated[float, Range(gt=0)] | None = 1800.0  # seconds without progress that end the run

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name

    def __post_init__(self) -> None:
        if fault := _folder_name_fault(self.name):
            raise ValueError(f"name {fault}: it is the run's folder in `dir`")
        if not self.dir.strip():
            raise ValueError("dir is empty: name a folder, or `.` for the working directory")


def _folder_name_fault(name: str) -> str | None:
    """Why a folder cannot be called so, or should not; None for a name that fits."""
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    if not name:
        return "is empty"
    parts = name.split("/")  # a run may lie in a folder of runs: `first/lr_1e-4`
    if not {"", ".", ".."}.isdisjoint(parts):
        return f"{shown} leads elsewhere"
    if "\\" in name:
        return f"{shown} holds a backslash"
    if odd := [char for char in name if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]:
        return f"{shown} holds the unprintable character U+{ord(odd[0]):04X}"
    if any(part != part.strip() for part in parts):
        return f"{shown} begins or ends with a space"
    size = max(len(part.encode(errors="surrogateescape")) for part in parts)
    return f"{shown} takes {size} bytes, of 255 that file systems allow" if size > 255 else None


@dataclass(frozen=True)
class InitFromSection:
    """Weights to begin with. Optimizer, step and data position start anew."""

    path: str  # a run or one of its checkpoints; a safetensors file, or a folder of them; a .pt of tensors
    weights: Literal["model", "ema"] = "model"  # which of a checkpoint's weights
    format: str | None = None  # weight format of the files (diffusers, ...); none: the one that fits best
    strict: bool = True  # false: what is missing keeps its initialisation, what is left over is listed
    include: tuple[str, ...] = ()  # patterns of parameters to take, by their path in the task; none: all
    exclude: tuple[str, ...] = ()  # patterns of parameters to leave as initialised
    prefixes: Mapping[str, str] = field(default_factory=dict)  # start of a stored name -> path in the task


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
    group_by_length: bool = False  # training batches of samples of similar length: less padding, less waiting

    def __post_init__(self) -> None:
        if self.group_by_length and self.sampler != "random":
            raise ValueError("group_by_length: a sequential order stays as it is; set sampler: random")


@dataclass(frozen=True)
class DataSection:
    """What is read."""

    train: Annotated[ComponentConfig, Kind("dataset")]
    validation: Annotated[ComponentConfig, Kind("dataset")] | None = None  # evaluated while training
    test: Annotated[ComponentConfig, Kind("dataset")] | None = None  # evaluated once, after the last step
    loader: LoaderSection = field(default_factory=LoaderSection)

    @property
    def splits(self) -> dict[str, ComponentConfig]:
        """The datasets that the config names, `train` first."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: dataset for name, dataset in named.items() if dataset is not None}


@dataclass(frozen=True)
class NonFiniteSection:
    """What follows on a loss or gradient that is not finite. No rank ever updates with it."""

    policy: Literal["stop", "skip"] = "stop"  # skip: the step is left out, within the limits below
    in_a_row: Annotated[int, Range(ge=1)] = 3  # skipped steps that end the run
    in_all: Annotated[int, Range(ge=1)] = 100  # skipped steps that end the run


@dataclass(frozen=True)
class SpikeSection:
    """A gradient norm far above the latest ones."""

    factor: Annotated[float, Range(gt=1)]  # times the median of the latest norms
    window: Annotated[int, Range(ge=2)] = (
        100  # steps that the median is over; none is judged before half of them
    )
    policy: Literal["skip", "stop", "warn"] = "skip"  # skip: the step is left out
    in_a_row: Annotated[int, Range(ge=1)] = 20  # skipped steps that end the run: the norm has moved for good


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained otherwise than the rest."""

    match: tuple[str, ...]  # patterns of modules or parameters, by their path in the task
    lr_scale: Annotated[float, Range(ge=0)] = 1.0  # times the optimizer's learning rate
    weight_decay: Annotated[float, Range(ge=0)] | None = None  # none: the optimizer's


@dataclass(frozen=True)
class TrainSection:
    """How long, how much a step, how far a step."""

    steps: Annotated[int, Range(ge=0)] | None = None  # optimizer steps in all; or epochs
    epochs: Annotated[float, Range(gt=0)] | None = None  # passes over data.train in all; or steps
    micro_batch_size: Annotated[int, Range(ge=1)] = 1  # samples a forward on one rank
    global_batch_size: Annotated[int, Range(ge=1)] | None = (
        None  # samples a step over all ranks; none: no accumulation
    )
    clip_grad_norm: Annotated[float, Range(gt=0)] | None = 1.0  # global L2 norm; none: only measured
    adapters: tuple[AdapterConfig, ...] = ()  # low-rank changes, trained in the place of all other weights
    also_train: tuple[str, ...] = ()  # patterns of modules or parameters trained in full beside adapters
    base_dtype: Literal["bf16"] | None = None  # of weights below adapters, where they lie; none: as built
    freeze: tuple[str, ...] = ()  # patterns of modules or parameters that are not trained
    parameter_groups: tuple[ParameterGroup, ...] = ()  # the first that matches a parameter counts
    decay_norms_and_biases: bool = True  # false: no weight decay on parameters of one dimension
    non_finite: NonFiniteSection = field(default_factory=NonFiniteSection)
    spike: SpikeSection | None = None  # none: no gradient norm is too large
    overfit_one_batch: bool = False  # every step sees the first global batch, with the same noise

    def __post_init__(self) -> None:
        size, micro = self.global_batch_size, self.micro_batch_size
        if size is not None and size % micro:
            raise ValueError(f"global_batch_size {size} is not a multiple of micro_batch_size {micro}")
        if self.steps is None and self.epochs is None:
            raise ValueError("steps or epochs must say how long to train")
        names = [adapter.name for adapter in self.adapters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"adapters: {twice[0]!r} is the name of several; give each a name of its own")
        if self.adapters and not any(adapter.train for adapter in self.adapters):
            raise ValueError("adapters: none of them is trained")
        if self.also_train and not self.adapters:
            raise ValueError("also_train: without adapters everything is trained that freeze leaves")
        if self.base_dtype is not None and not self.adapters:
            raise ValueError("base_dtype: it is of weights below adapters, and there are none")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both set; one of them says how long to train")


@dataclass(frozen=True)
class EMASection:
    """An exponential moving average of the weights, used for validation, sampling and export."""

    decay: Annotated[float, Range(ge=0, lt=1)] = 0.9999  # share of the average that a step keeps
    ramp: bool = True  # begins with (1 + n) / (10 + n) after n updates, as long as that is less
    every: Annotated[int, Range(ge=1)] = 1  # steps between updates, whose decay is decay^every
    device: Literal["same", "cpu"] = "same"  # where the average is kept


@dataclass(frozen=True)
class SamplesSection:
    """Clips that are generated while training."""

    prompts: tuple[str, ...]  # one clip each
    images: tuple[str, ...] = ()  # files of first frames, for image-to-video: one for all, or one a prompt
    last_images: tuple[str, ...] = ()  # files of last frames, where the predictor takes them
    every: Annotated[int, Range(ge=1)] | None = None  # steps; none: with each validation
    negative_prompt: str = ""  # what guidance leads away from
    steps: Annotated[int, Range(ge=1)] | None = None  # solver steps; none: as in task.sample
    guidance: Guidance | None = None  # none: as in task.sample
    seed: int = 0  # noise of clip i comes from (seed, i)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts is empty: name what to show, or leave samples out")


@dataclass(frozen=True)
class ValidationSection:
    """Held-out loss and sampled clips while training."""

    every: Annotated[int, Range(ge=1)] = 500  # steps
    rows: Annotated[int, Range(ge=1)] | None = field(default=None, metadata={"aliases": ("clips",)})
    """how many of data.validation, evenly spaced; none: all"""
    timesteps: Literal["quantiles"] | tuple[Annotated[float, Range(gt=0, lt=1)], ...] = (
        "quantiles"  # of the training density, the same for every sample: 0.1, 0.3, 0.5, 0.7, 0.9
    )
    samples: SamplesSection | None = None  # none: no clips
    metrics: tuple[Annotated[ComponentConfig, Kind("metric")], ...] = ()  # beside the loss
    at_start: bool = False  # also before the first step

    def __post_init__(self) -> None:
        if not self.timesteps:
            raise ValueError("timesteps is empty: quantiles, or a list of places in the training density")

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The timesteps' places in the training density."""
        return (0.1, 0.3, 0.5, 0.7, 0.9) if self.timesteps == "quantiles" else tuple(self.timesteps)


@dataclass(frozen=True)
class CheckpointSection:
    """When state is saved and how much of it is kept. The last step is always saved."""

    every: Annotated[int, Range(ge=1)] = 1000  # steps
    every_minutes: Annotated[float, Range(gt=0)] | None = None  # also after that long without a save
    keep: Annotated[int, Range(ge=1)] = 3  # newest complete checkpoints that stay
    keep_every: Annotated[int, Range(ge=1)] | None = None  # those of every so many steps stay as well
    best: str | None = None  # metric of the validation (`loss`, ...) whose best checkpoint stays as well
    mode: Literal["min", "max"] = "min"  # which value of `best` is best
    async_: bool = True  # written by a thread while training goes on; false: training waits for the disk
    frozen: bool | None = None  # hold frozen weights that files bring; none: but for runs with adapters


@dataclass(frozen=True)
class LogSection:
    """What is written while training."""

    every: Annotated[int, Range(ge=1)] = 1  # steps
    detail_every: Annotated[int, Range(ge=1)] = 50  # steps; loss by noise level, timestep histogram, times
    trackers: tuple[Annotated[ComponentConfig, Kind("tracker")], ...] = ()  # beside metrics.jsonl


@dataclass(frozen=True)
class ProfileSection:
    """A window of steps that torch.profiler records into `<run>/profile`."""

    steps: tuple[Annotated[int, Range(ge=1)], Annotated[int, Range(ge=1)]]  # first and last step, from 1
    memory: bool = True  # also a snapshot of the device's allocator
    ranks: tuple[Annotated[int, Range(ge=0)], ...] = (0,)  # that are recorded

    def __post_init__(self) -> None:
        if self.steps[0] > self.steps[1]:
            raise ValueError("steps must rise: [first, last]")


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
    init_from: InitFromSection | None = None
    ema: EMASection | None = None
    validation: ValidationSection | None = None
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    profile: ProfileSection | None = None
    callbacks: tuple[Annotated[ComponentConfig, Kind("callback")], ...] = ()
    plugins: PluginsSection = field(default_factory=PluginsSection)
    registry: Registry = field(
        default_factory=get_registry, compare=False, repr=False, metadata={"yaml": False}
    )
    """The plugins that the config was checked against: they build what it names."""
    literals: Mapping[str, str] = field(default_factory=dict, compare=False, metadata={"yaml": False})
    """Dotted key -> the `${oc.env:..}` text that stood there; what is written keeps the text."""
    allow_code: bool = field(default=False, compare=False, metadata={"yaml": False})
    """Code of stored runs, also of those that this one begins with, runs where this user has not trained
    with it."""
    unknown_commands: tuple[str, ...] = field(default=(), compare=False, metadata={"yaml": False})
    """Programs of callbacks that may not run: a stored run names them."""

    def __post_init__(self) -> None:
        validation, checkpoint = self.validation, self.checkpoint
        if validation is not None and self.data.validation is None and validation.samples is None:
            raise ValueError("validation has nothing to do: set data.validation, or validation.samples")
        if validation is None and self.data.validation is not None:
            raise ValueError("data.validation is set, but validation (every: 500, say) is not")
        if checkpoint.best is not None:
            if validation is None or self.data.validation is None:
                raise ValueError("checkpoint.best needs a validation: set validation and data.validation")
            if checkpoint.every % validation.every and validation.every % checkpoint.every:
                raise ValueError(
                    f"of checkpoint.every {checkpoint.every} and validation.every {validation.every} neither"
                    " is a multiple of the other: checkpoint.best is judged where both fall together"
                )
