"""Config of the built-in task `text_to_video`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.schema.fields import ComponentConfig, Guidance, Kind, Range

_Size = Annotated[int, Range(ge=1)]
_Share = Annotated[float, Range(ge=0, le=1)]


@dataclass(frozen=True)
class SampleConfig:
    """Defaults for the clips that `mm sample` and validation generate."""

    steps: _Size = 50  # solver steps
    guidance: Guidance = 5.0  # guidance scale (classifier-free: usually off up to 1); a list: one per expert
    true_guidance: Annotated[float, Range(ge=0)] | None = (
        None  # predictors with embedded guidance: scale of a second, unconditional pass; null: no such pass
    )
    num_frames: _Size | None = None  # frames; null: as in data.train
    height: _Size | None = None  # pixels; null: as in data.train
    width: _Size | None = None  # pixels; null: as in data.train
    fps: Annotated[float, Range(gt=0)] | None = None  # frames per second; null: as in data.train
    batch_size: _Size = 4  # clips generated together


@dataclass(frozen=True)
class TextToVideoConfig:
    """Config of the task `text_to_video`: diffusion training of captioned clips."""

    predictor: Annotated[ComponentConfig, Kind("predictor")]  # the network that is trained
    autoencoder: Annotated[ComponentConfig, Kind("autoencoder")]  # pixels <-> latents, frozen
    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")]  # captions -> hidden states, frozen
    scheduler: Annotated[ComponentConfig, Kind("scheduler")]  # noise, targets, sampling
    caption_dropout: _Share = 0.0  # share of captions replaced by ""; needed for guidance
    latents: Literal["mode", "sample"] | None = (
        None  # mode or sample of the autoencoder's posterior; null: as the autoencoder sets it, else mode
    )
    image_encoder: Annotated[ComponentConfig, Kind("image_encoder")] | None = (
        None  # conditioning frames -> features, frozen; for predictors that accept them
    )
    frames: tuple[Literal["first", "last"], ...] | None = (
        None  # conditioning frames taken from each training clip; null: as the predictor expects
    )
    train_guidance: Annotated[float, Range(ge=0)] | None = (
        None  # predictors with embedded guidance: the scale that they get in training and evaluation; null: 1
    )
    sample: SampleConfig = field(default_factory=SampleConfig)
