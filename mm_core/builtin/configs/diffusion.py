"""Configs of the built-in noise scheduler, autoencoder and text encoders: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import DType, Range


@dataclass(frozen=True)
class FlowMatchConfig:
    """Rectified flow."""

    num_train_timesteps: Annotated[int, Range(ge=1)] = 1000  # the timestep that pure noise is called
    shift: Annotated[float, Range(gt=0)] = 1.0  # moves timesteps towards noise; 3 to 8 for large clips
    timesteps: Literal["uniform", "logit_normal"] = (
        "uniform"  # density that training draws from, before the shift
    )
    logit_mean: float = 0.0  # of the logit-normal density
    logit_std: Annotated[float, Range(gt=0)] = 1.0  # of the logit-normal density


@dataclass(frozen=True)
class PixelConfig:
    """Space-to-depth and time-to-depth: no weights, nothing lost."""

    spatial: Annotated[int, Range(ge=1)] = 2  # pixels a latent, along height and along width
    temporal: Annotated[int, Range(ge=1)] = 1  # frames a latent


@dataclass(frozen=True)
class ByteTextConfig:
    """Byte-level hidden states from fixed tables."""

    hidden_size: Annotated[int, Range(ge=2)] = 64  # width of a hidden state
    max_length: Annotated[int, Range(ge=2)] = 128  # tokens; one a byte, and one for the end


@dataclass(frozen=True)
class HFTextConfig:
    """A Transformers text encoder."""

    from_pretrained: str  # folder with config.json and safetensors weights
    tokenizer: str | None = None  # folder of the tokenizer; none: the same folder
    max_length: Annotated[int, Range(ge=1)] = 512  # tokens; longer captions are cut
    dtype: DType = "bf16"  # of the weights and the hidden states
