"""The schema of a run's config: frozen dataclasses, the only place where defaults are set."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.errors import plural
from mm_core.hub_files import Use
from mm_core.plugin.registry import Registry, get_registry
from mm_core.schema.fields import ComponentConfig, Guidance, InputPath, Kind, Range


@dataclass(frozen=True)
class RunSection:
    """Config section `run`: the run's folder, its seed and its limits."""

    name: str  # the run's folder under `dir`
    dir: str = "runs"  # folder of runs
    seed: int = 1234  # seed of everything random in the run
    deterministic: bool = False  # refuse kernels with varying results; slower
    float32_matmul: Literal["highest", "high", "medium"] | None = None  # null: as torch has it
    stuck_after: Annotated[float, Range(gt=0)] | None = 1800.0  # seconds without progress that end the run

    @property
    def folder(self) -> Path:
        """The folder of the run that the config describes."""
        return Path(self.dir) / self.name

    def __post_init__(self) -> None:
        if fault := _folder_name_fault(self.name):
            raise ValueError(f"name {fault}: choose a valid folder name, the run's folder in `dir`")
        if not self.dir.strip():
            raise ValueError("dir is empty: set a folder, or `.` for the working directory")


def _folder_name_fault(name: str) -> str | None:
    """Why the name of a run's folder is not valid; None if it is."""
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    if not name:
        return "is empty"
    parts = name.split("/")  # a run may be in a subfolder: `first/lr_1e-4`
    if not {"", ".", ".."}.isdisjoint(parts):
        return f"{shown} leads out of the folder of runs"
    if "\\" in name:
        return f"{shown} contains a backslash"
    if odd := [char for char in name if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]:
        return f"{shown} contains the unprintable character U+{ord(odd[0]):04X}"
    if any(part != part.strip() for part in parts):
        return f"{shown} starts or ends with a space"
    size = max(len(part.encode(errors="surrogateescape")) for part in parts)
    return f"{shown} takes {plural(size, 'byte')}; file systems allow 255" if size > 255 else None


@dataclass(frozen=True)
class InitFromSection:
    """Config section `init_from`: weights to start from; optimizer, step and data position start anew."""

    path: InputPath  # a run, a checkpoint, a safetensors file or a folder of them, or a .pt file of tensors
    weights: Literal["model", "ema"] = "model"  # which weights of a checkpoint to use
    format: str | None = None  # weight format of the files (diffusers, ...); null: the one that matches best
    strict: bool = True  # false: missing weights keep their initialisation, unused ones are listed
    include: tuple[str, ...] = ()  # patterns of parameters to load, by their path in the task; empty: all
    exclude: tuple[str, ...] = ()  # patterns of parameters that keep their initialisation
    prefixes: Mapping[str, str] = field(default_factory=dict)  # prefix of stored names -> path in the task


@dataclass(frozen=True)
class BucketSection:
    """Config section of one item of `data.loader.buckets`: samples of one size, which share batches."""

    num_frames: Annotated[int, Range(ge=1)]  # 1 for images
    height: Annotated[int, Range(ge=1)]  # pixels
    width: Annotated[int, Range(ge=1)]  # pixels
    micro_batch_size: Annotated[int, Range(ge=1)] | None = None  # null: as many tokens as the largest bucket


@dataclass(frozen=True)
class LoaderSection:
    """Config section `data.loader`: how samples are read, batched and passed to training steps."""

    mode: Literal["sampler", "variable", "base"] = "sampler"
    """variable: in buckets of frames, aspect and size; base: your own torch Dataset or DataLoader as it is"""
    buckets: Literal["auto"] | tuple[BucketSection, ...] = "auto"  # of mode variable; auto: from the limits
    buckets_per_step: Annotated[int, Range(ge=1)] = 1  # different buckets in a step of several micro-batches
    rests: Literal["pad", "drop", "keep"] = "pad"  # samples that fill no step; keep: for the next epoch
    upscale: bool = False  # whether images and clips smaller than every bucket are enlarged
    group_frame: bool = False  # with auto: buckets differ in frames alone
    group_resolution: bool = False  # with auto: buckets differ in aspect and resolution alone
    sampler: Literal["random", "sequential"] = "random"  # order within an epoch
    workers: Annotated[int, Range(ge=0)] = 2  # reader processes per rank; 0: read in the training process
    prefetch: Annotated[int, Range(ge=1)] = 2  # micro-batches that each worker keeps ready
    drop_last: bool = True  # false: keep the smaller last batch of an epoch; its loss stays exact
    pin_memory: bool = True  # page-locked batches, if there is an accelerator
    max_failed_share: Annotated[float, Range(ge=0, le=1)] = 0.1  # largest share of unreadable samples
    group_by_length: bool = False  # training batches of samples of similar length: less padding, less waiting
    balance: bool = False  # each rank gets about as much work of images in a step, of the same samples

    def __post_init__(self) -> None:
        if self.mode != "variable":
            for name in (
                "buckets",
                "buckets_per_step",
                "rests",
                "upscale",
                "group_frame",
                "group_resolution",
            ):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} works only with mode: variable; set it or remove {name}")
        if self.buckets == ():
            raise ValueError("buckets is empty: list at least one bucket, or write `auto`")
        for name in ("group_by_length", "balance"):
            if self.mode != "sampler" and getattr(self, name):
                raise ValueError(f"{name} works only with mode: sampler; remove one of the two keys")
        if self.group_by_length and self.sampler != "random":
            raise ValueError(
                "group_by_length works only with sampler: random; set it or remove group_by_length"
            )


@dataclass(frozen=True)
class CacheSection:
    """Config section `data.cache`: the feature cache, what frozen components compute, encoded once."""

    dir: str = "cache"  # its folder, which several runs and hosts may share
    variants: Annotated[int, Range(ge=1)] = 1  # samples of each row with random starts, crops or captions
    missing: Literal["error", "encode"] = "error"  # what is not cached; encode: in training, and it is added

    def __post_init__(self) -> None:
        if not self.dir.strip():
            raise ValueError("dir is empty: set a folder")


@dataclass(frozen=True)
class DataSection:
    """Config section `data`: the datasets for training, validation and test, and the loader."""

    train: Annotated[ComponentConfig, Kind("dataset")]  # trained on
    validation: Annotated[ComponentConfig, Kind("dataset")] | None = None  # evaluated while training
    test: Annotated[ComponentConfig, Kind("dataset")] | None = None  # evaluated once, after the last step
    loader: LoaderSection = field(default_factory=LoaderSection)
    cache: CacheSection | None = None  # null: encoders run in every step
    decode_seconds: Annotated[float, Range(ge=0.1, le=86400)] = 60.0
    """how long a data worker may decode one file; the worker is then ended, and the file is unreadable"""

    @property
    def splits(self) -> dict[str, ComponentConfig]:
        """The datasets that the config names, by split, `train` first."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: dataset for name, dataset in named.items() if dataset is not None}


@dataclass(frozen=True)
class NonFiniteSection:
    """Config section `train.non_finite`: what happens when a loss or gradient is not finite.

    No rank ever updates its weights with such a gradient.
    """

    policy: Literal["stop", "skip"] = "stop"  # skip: the step is skipped, within the limits below
    in_a_row: Annotated[int, Range(ge=1)] = 3  # consecutive skipped steps that end the run
    in_all: Annotated[int, Range(ge=1)] = 100  # skipped steps in total that end the run


@dataclass(frozen=True)
class SpikeSection:
    """Config section `train.spike`: what happens when a gradient norm is far above the recent ones."""

    factor: Annotated[
        float, Range(gt=1)
    ]  # a spike is a norm above this factor times the median of recent norms
    window: Annotated[int, Range(ge=2)] = (
        100  # number of steps in the median; spikes are detected after half of them
    )
    policy: Literal["skip", "stop", "warn"] = "skip"  # skip: the step is skipped
    in_a_row: Annotated[int, Range(ge=1)] = 20  # consecutive skipped steps that end the run


@dataclass(frozen=True)
class ParameterGroup:
    """Config section of one item of `train.parameter_groups`: parameters with their own learning rate."""

    match: tuple[str, ...]  # patterns of modules or parameters, by their path in the task
    lr_scale: Annotated[float, Range(ge=0)] = 1.0  # factor of the optimizer's learning rate
    weight_decay: Annotated[float, Range(ge=0)] | None = None  # null: as the optimizer sets it


@dataclass(frozen=True)
class TrainSection:
    """Config section `train`: training length, batch sizes, gradient clipping, what is trained."""

    steps: Annotated[int, Range(ge=0)] | None = None  # optimizer steps in total; or set epochs
    epochs: Annotated[float, Range(gt=0)] | None = None  # passes over data.train in total; or set steps
    micro_batch_size: Annotated[int, Range(ge=1)] = 1  # samples per forward on one rank
    global_batch_size: Annotated[int, Range(ge=1)] | None = (
        None  # samples per step over all ranks; null: no accumulation
    )
    clip_grad_norm: Annotated[float, Range(gt=0)] | None = 1.0  # largest global L2 norm; null: only measured
    adapters: tuple[AdapterConfig, ...] = ()  # low-rank adapters, trained instead of all other weights
    also_train: tuple[str, ...] = ()  # patterns of modules or parameters trained in full beside adapters
    base_dtype: Literal["bf16", "int8", "fp8", "nf4"] | None = (
        None  # dtype of the weights under adapters; int8, fp8, nf4: linear layers of blocks; null: as built
    )
    freeze: tuple[str, ...] = ()  # patterns of modules or parameters that are not trained
    parameter_groups: tuple[ParameterGroup, ...] = ()  # the first group that matches a parameter applies
    decay_norms_and_biases: bool = True  # false: no weight decay on parameters of one dimension
    non_finite: NonFiniteSection = field(default_factory=NonFiniteSection)
    spike: SpikeSection | None = None  # null: any gradient norm is accepted
    overfit_one_batch: bool = False  # train every step on the first global batch, with the same noise

    def __post_init__(self) -> None:
        size, micro = self.global_batch_size, self.micro_batch_size
        if size is not None and size % micro:
            raise ValueError(f"global_batch_size {size} is not a multiple of micro_batch_size {micro}")
        if self.steps is None and self.epochs is None:
            raise ValueError(
                "steps and epochs are both missing; set one of them to the length of the training"
            )
        names = [adapter.name for adapter in self.adapters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"adapters: the name {twice[0]!r} is used twice; give each adapter its own name")
        if self.adapters and not any(adapter.train for adapter in self.adapters):
            raise ValueError("adapters: none of them is trained; set train: true for at least one")
        if self.also_train and not self.adapters:
            raise ValueError(
                "also_train works only with adapters; without them everything is trained except `freeze`"
            )
        if self.base_dtype is not None and not self.adapters:
            raise ValueError("base_dtype works only with adapters; set train.adapters or remove base_dtype")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both set; remove one of them")


@dataclass(frozen=True)
class EMASection:
    """Config section `ema`: a moving average of the weights, used for validation, sampling and export."""

    decay: Annotated[float, Range(ge=0, lt=1)] = 0.9999  # share of the average that one step keeps
    ramp: bool = True  # smaller decay at the start: (1 + n) / (10 + n) after n updates
    every: Annotated[int, Range(ge=1)] = 1  # steps between updates; an update then uses decay^every
    device: Literal["same", "cpu"] = "same"  # device that holds the average


@dataclass(frozen=True)
class SamplesSection:
    """Config section `validation.samples`: clips that are generated during training."""

    prompts: tuple[str, ...]  # prompts; one clip each
    images: tuple[
        str, ...
    ] = ()  # first frames for image-to-video: one file for all prompts, or one per prompt
    last_images: tuple[str, ...] = ()  # files of last frames, for predictors that accept them
    inputs: Mapping[str, tuple[str | float | tuple[str, ...], ...]] = field(
        default_factory=dict
    )  # further inputs by field: pictures, clips, numbers, or lists of pictures; one for all or each prompt
    every: Annotated[int, Range(ge=1)] | None = None  # steps between samples; null: with each validation
    negative_prompt: str = ""  # text that guidance steers away from
    steps: Annotated[int, Range(ge=1)] | None = None  # solver steps; null: as in task.sample
    guidance: Guidance | None = None  # classifier-free guidance scale; null: as in task.sample
    seed: int = 0  # the noise of clip i is drawn from (seed, i)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts is empty: list at least one prompt, or remove samples")


@dataclass(frozen=True)
class ValidationSection:
    """Config section `validation`: held-out loss, metrics and sampled clips during training."""

    every: Annotated[int, Range(ge=1)] = 500  # steps between validations
    rows: Annotated[int, Range(ge=1)] | None = field(default=None, metadata={"aliases": ("clips",)})
    """number of rows of data.validation, evenly spaced; null: all"""
    timesteps: Literal["quantiles"] | tuple[Annotated[float, Range(gt=0, lt=1)], ...] = (
        "quantiles"  # quantiles of the training density, for every sample: 0.1, 0.3, 0.5, 0.7, 0.9
    )
    samples: SamplesSection | None = None  # clips to generate; null: no clips
    metrics: tuple[Annotated[ComponentConfig, Kind("metric")], ...] = ()  # metrics beside the loss
    at_start: bool = False  # also validate before the first step

    def __post_init__(self) -> None:
        if not self.timesteps:
            raise ValueError("timesteps is empty: write `quantiles`, or a list of numbers between 0 and 1")

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The quantiles of the training density at which a validation measures the loss."""
        return (0.1, 0.3, 0.5, 0.7, 0.9) if self.timesteps == "quantiles" else tuple(self.timesteps)


@dataclass(frozen=True)
class CheckpointSection:
    """Config section `checkpoint`: when checkpoints are saved and kept. The last step is always saved."""

    every: Annotated[int, Range(ge=1)] = 1000  # steps between checkpoints
    every_minutes: Annotated[float, Range(gt=0)] | None = None  # also save after this long without a save
    keep: Annotated[int, Range(ge=1)] = 3  # number of newest complete checkpoints to keep
    keep_every: Annotated[int, Range(ge=1)] | None = None  # also keep the checkpoint of every n-th step
    best: str | None = None  # validation metric (`loss`, ...); also keep the checkpoint with its best value
    mode: Literal["min", "max"] = "min"  # whether the smallest or the largest value of `best` is best
    async_: bool = True  # a thread writes while training continues; false: training waits for the disk
    export: Literal["lora/comfyui", "lora/kohya", "lora/diffusers", "lora/peft"] | None = (
        None  # also write the adapters as such LoRA files at each save, into the run's exports/
    )
    frozen: bool | None = None  # store frozen weights loaded from files; null: only in runs without adapters


@dataclass(frozen=True)
class LogSection:
    """Config section `log`: which figures a run logs during training, and where."""

    every: Annotated[int, Range(ge=1)] = 1  # steps between log lines
    detail_every: Annotated[int, Range(ge=1)] = 50  # steps between details: loss by noise level, times, ...
    trackers: tuple[Annotated[ComponentConfig, Kind("tracker")], ...] = ()  # trackers beside metrics.jsonl


@dataclass(frozen=True)
class ProfileSection:
    """Config section `profile`: a range of steps that torch.profiler records into `<run>/profile`."""

    steps: tuple[Annotated[int, Range(ge=1)], Annotated[int, Range(ge=1)]]  # first and last step, from 1
    memory: bool = True  # also write a snapshot of the device's allocator
    ranks: tuple[Annotated[int, Range(ge=0)], ...] = (0,)  # ranks that are recorded

    def __post_init__(self) -> None:
        if self.steps[0] > self.steps[1]:
            raise ValueError("steps must be [first, last] with first <= last")


@dataclass(frozen=True)
class PluginsSection:
    """Config section `plugins`: plugins of this run that are not installed."""

    path: tuple[str, ...] = ()  # Python files of one-file plugins, relative to this file; namespace `local/`


@dataclass(frozen=True)
class RunConfig:
    """The config of a run, checked and complete, with every default filled in."""

    run: RunSection
    task: Annotated[ComponentConfig, Kind("task")]  # what is trained, and with which loss
    data: DataSection
    train: TrainSection
    engine: Annotated[ComponentConfig, Kind("engine")] = ComponentConfig("engine", "core/fsdp2")
    """how the model is spread over devices"""
    optimizer: Annotated[ComponentConfig, Kind("optimizer")] = ComponentConfig("optimizer", "core/adamw")
    """how gradients change the weights"""
    lr_schedule: Annotated[ComponentConfig, Kind("lr_schedule")] = ComponentConfig(
        "lr_schedule", "core/constant"
    )
    """factor of the optimizer's learning rate at each step"""
    init_from: InitFromSection | None = None
    ema: EMASection | None = None
    validation: ValidationSection | None = None
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    profile: ProfileSection | None = None
    callbacks: tuple[Annotated[ComponentConfig, Kind("callback")], ...] = ()  # called at events, in order
    plugins: PluginsSection = field(default_factory=PluginsSection)
    registry: Registry = field(
        default_factory=get_registry, compare=False, repr=False, metadata={"yaml": False}
    )
    """The plugins that the config was checked against; they build the components it names."""
    literals: Mapping[str, str] = field(default_factory=dict, compare=False, metadata={"yaml": False})
    """Dotted key -> the original `${oc.env:..}` text; the stored config keeps the text, not its value."""
    hub: Mapping[str, Use] = field(default_factory=dict, compare=False, metadata={"yaml": False})
    """Dotted key -> the name on the hub whose path is the value; the stored config keeps the name."""
    allow_code: bool = field(default=False, compare=False, metadata={"yaml": False})
    """Code of stored runs, including those this run starts from, may run even if this user has not trained
    with it."""
    unknown_commands: tuple[str, ...] = field(default=(), compare=False, metadata={"yaml": False})
    """Programs of callbacks that must not run, because a stored run names them."""

    def __post_init__(self) -> None:
        validation, checkpoint = self.validation, self.checkpoint
        if validation is not None and self.data.validation is None and validation.samples is None:
            raise ValueError(
                "validation is set but there is nothing to validate: set data.validation or"
                " validation.samples"
            )
        if validation is None and self.data.validation is not None:
            raise ValueError(
                "data.validation is set but validation is not: add e.g. `validation: {every: 500}`"
            )
        if checkpoint.export is not None and not self.train.adapters:
            raise ValueError("checkpoint.export writes adapters, but there are none: set train.adapters")
        if checkpoint.best is not None:
            if validation is None or self.data.validation is None:
                raise ValueError("checkpoint.best needs validation: set validation and data.validation")
            if checkpoint.every % validation.every and validation.every % checkpoint.every:
                raise ValueError(
                    "checkpoint.best needs steps with a checkpoint and a validation: make checkpoint.every"
                    f" ({checkpoint.every}) or validation.every ({validation.every}) a multiple of the other"
                )
