"""Configs of the plugin's components, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from mm_core.errors import ConfigError, MMError
from mm_core.plugin import DType, Range
from mm_diffusers.folder import PipelineFolder

_Positive = Annotated[float, Range(gt=0)]


@dataclass(frozen=True)
class TransformerConfig:
    """Config of the predictor `diffusers/transformer`."""

    from_pretrained: str | None = None  # the pipeline's folder; null: that of the task
    references: Annotated[int, Range(ge=0)] = (
        0  # most reference pictures of a sample (its field `references`), for families that take some
    )


@dataclass(frozen=True)
class VaeConfig:
    """Config of the autoencoder `diffusers/vae`."""

    from_pretrained: str | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "fp32"  # of its weights


@dataclass(frozen=True)
class TextConfig:
    """Config of the text encoder `diffusers/text`: all text encoders of a pipeline."""

    from_pretrained: str | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "bf16"  # of their weights
    max_length: Annotated[int, Range(ge=1)] | None = (
        None  # most tokens of a caption; null: as in the pipeline
    )


@dataclass(frozen=True)
class ImageConfig:
    """Config of the image encoder `diffusers/image`."""

    from_pretrained: str | None = None  # the pipeline's folder; null: that of the task
    dtype: DType = "bf16"  # of its weights


@dataclass(frozen=True)
class ScheduleConfig:
    """Config of the scheduler `diffusers/schedule`: flow matching, sampled as the pipeline samples."""

    from_pretrained: str | None = None  # the pipeline's folder; null: that of the task
    shift: Literal["sampling"] | _Positive = (
        1.0  # of the levels of noise in training: a number, or as the pipeline samples pictures of that size
    )
    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"  # density of training, before the shift
    logit_mean: float = 0.0  # of the logit-normal density
    logit_std: _Positive = 1.0  # of the logit-normal density


def check(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Faults of a component outside the task of its pipeline."""
    if options["from_pretrained"] is None:
        yield ConfigError(
            "the component has no from_pretrained, and the task names no pipeline",
            accepted="the folder of a pipeline of Diffusers",
            hint="use `task: {type: diffusers, pipeline: FOLDER}`, or set from_pretrained",
        )


def check_folder(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Faults of the predictor's pipeline."""
    yield from check(options)
    if options["from_pretrained"] is not None:
        yield from PipelineFolder(Path(options["from_pretrained"])).faults()
