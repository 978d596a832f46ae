"""Config of the built-in task `text_to_video`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.schema.fields import ComponentConfig, Guidance, Kind, Range

_Size = Annotated[int, Range(ge=1)]
_Share = Annotated[float, Range(ge=0, le=1)]


@dataclass(frozen=True)
class SampleConfig:
    """What `mm sample` and validation generate unless they are told otherwise."""

    steps: _Size = 50  # solver steps
    guidance: Guidance = 5.0  # classifier-free guidance scale; up to 1 it is off; a list: one for each expert
    num_frames: _Size | None = None  # frames; none: as in data.train
    height: _Size | None = None  # pixels; none: as in data.train
    width: _Size | None = None  # pixels; none: as in data.train
    fps: Annotated[float, Range(gt=0)] | None = None  # frames a second; none: as in data.train
    batch_size: _Size = 4  # clips generated together


@dataclass(frozen=True)
class TextToVideoConfig:
    """Diffusion training of captioned clips."""

    predictor: Annotated[ComponentConfig, Kind("predictor")]  # what is trained
    autoencoder: Annotated[ComponentConfig, Kind("autoencoder")]  # pixels <-> latents, frozen
    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")]  # captions -> hidden states, frozen
    scheduler: Annotated[ComponentConfig, Kind("scheduler")]  # noise, targets, sampling
    caption_dropout: _Share = 0.0  # share of captions replaced by ""; needed for guidance
    latents: Literal["mode", "sample"] | None = (
        None  # of the autoencoder's posterior; none: as the autoencoder's options say, else mode
    )
    image_encoder: Annotated[ComponentConfig, Kind("image_encoder")] | None = (
        None  # given frames -> features, frozen; for predictors that take them
    )
    frames: tuple[Literal["first", "last"], ...] | None = (
        None  # of each training clip, that the predictor is shown; none: as the predictor is made for
    )
    sample: SampleConfig = field(default_factory=SampleConfig)
