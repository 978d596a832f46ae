"""Configs of the plugin's components, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from mm_core.errors import ConfigError, MMError
from mm_core.plugin import ComponentConfig, DType, InputPath, Kind, Range
from mm_core.tasks import TextToVideoConfig
from mm_diffusers.families import Family, check_references
from mm_diffusers.folder import PipelineFolder

_Positive = Annotated[float, Range(gt=0)]


@dataclass(frozen=True)
class TransformerConfig:
    """Config of the predictor `diffusers/transformer`."""

    from_pretrained: InputPath | None = None  # the pipeline's folder; null: that of the task
    references: Annotated[int, Range(ge=0)] = (
        0  # most reference pictures of a sample (its field `references`), for families that take some; of
        # those that edit pictures, 0 is 1
    )
    family: Family | None = None  # recipe of the pipeline; null: that of its class, if it is known


@dataclass(frozen=True)
class VaeConfig:
    """Config of the autoencoder `diffusers/vae`."""

    from_pretrained: InputPath | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "fp32"  # of its weights
    family: Family | None = None  # recipe of the pipeline; null: that of the predictor


@dataclass(frozen=True)
class TextConfig:
    """Config of the text encoder `diffusers/text`: all text encoders of a pipeline."""

    from_pretrained: InputPath | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "bf16"  # of their weights
    max_length: Annotated[int, Range(ge=1)] | None = (
        None  # most tokens of a caption; null: as in the pipeline
    )
    family: Family | None = None  # recipe of the pipeline; null: that of the predictor


@dataclass(frozen=True)
class ImageConfig:
    """Config of the image encoder `diffusers/image`."""

    from_pretrained: InputPath | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "bf16"  # of its weights
    family: Family | None = None  # recipe of the pipeline; null: that of the predictor


@dataclass(frozen=True)
class ScheduleConfig:
    """Config of the scheduler `diffusers/schedule`: flow matching, sampled as the pipeline samples."""

    from_pretrained: InputPath | None = None  # the pipeline's folder; null: that of the task
    shift: Literal["sampling"] | _Positive = (
        1.0  # of the levels of noise in training: a number, or as the pipeline samples pictures of that size
    )
    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"  # density of training, before the shift
    logit_mean: float = 0.0  # of the logit-normal density
    logit_std: _Positive = 1.0  # of the logit-normal density
    family: Family | None = None  # recipe of the pipeline; null: that of the predictor


_PREDICTOR, _AUTOENCODER, _TEXT_ENCODER, _SCHEDULER = (
    ComponentConfig(kind, f"diffusers/{name}", {"from_pretrained": None})
    for kind, name in (
        ("predictor", "transformer"),
        ("autoencoder", "vae"),
        ("text_encoder", "text"),
        ("scheduler", "schedule"),
    )
)


@dataclass(frozen=True, kw_only=True)
class PipelineTaskConfig(TextToVideoConfig):
    """Config of the task `diffusers/pipeline`: what is not set here comes from the pipeline's folder."""

    pipeline: InputPath  # folder of a pipeline of Diffusers
    predictor: Annotated[ComponentConfig, Kind("predictor")] = _PREDICTOR
    autoencoder: Annotated[ComponentConfig, Kind("autoencoder")] = _AUTOENCODER
    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")] = _TEXT_ENCODER
    scheduler: Annotated[ComponentConfig, Kind("scheduler")] = _SCHEDULER

    def __post_init__(self) -> None:
        folder = PipelineFolder(Path(self.pipeline), self.predictor.options.get("family"))
        if self.image_encoder is None and folder.has("image_encoder"):
            own = ComponentConfig(
                "image_encoder", "diffusers/image", {"from_pretrained": None, "family": None}
            )
            object.__setattr__(self, "image_encoder", own)
        filled = {"from_pretrained": self.pipeline, "family": self.predictor.options.get("family")}
        for each in fields(self):
            part = getattr(self, each.name)
            if not isinstance(part, ComponentConfig):
                continue
            new = {name: value for name, value in filled.items() if part.options.get(name, "") is None}
            if new:
                options = {**part.options, **new}
                object.__setattr__(self, each.name, replace(part, options=options, derived=tuple(new)))


def check(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Faults of a component outside the task of its pipeline."""
    if options["from_pretrained"] is None:
        yield ConfigError(
            "the component has no from_pretrained, and the task names no pipeline",
            accepted="the folder of a pipeline of Diffusers",
            hint="use `task: {type: diffusers, pipeline: FOLDER}`, or set from_pretrained",
        )


def check_folder(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Faults of the predictor's pipeline, once it is there."""
    yield from check(options)
    path = options["from_pretrained"]
    if path is not None and Path(path).exists():
        folder = PipelineFolder(Path(path), options["family"])
        if faults := list(folder.faults()):
            yield from faults
            return
        try:
            check_references(folder.kind, folder.family, options["references"])
        except MMError as fault:
            yield fault
