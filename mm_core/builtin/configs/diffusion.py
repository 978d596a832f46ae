"""Configs of the built-in noise scheduler, autoencoder and text encoders, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import DType, InputPath, Range


@dataclass(frozen=True)
class DynamicShift:
    """A shift that depends on the number of tokens (patches of latents) of a sample, as in FLUX.

    mu is linear in the tokens, from `base_shift` at `base_tokens` to `max_shift` at `max_tokens`, and
    continues beyond both.
    """

    base_shift: float = 0.5  # mu at base_tokens
    max_shift: float = 1.15  # mu at max_tokens
    base_tokens: Annotated[int, Range(ge=1)] = 256  # tokens of a sample
    max_tokens: Annotated[int, Range(ge=1)] = 4096  # tokens of a sample
    form: Literal["exponential", "linear"] = "exponential"  # the shift: exp(mu), or mu itself

    def __post_init__(self) -> None:
        if self.base_tokens >= self.max_tokens:
            raise ValueError("base_tokens must be less than max_tokens, e.g. 256 and 4096")
        if self.form == "linear" and min(self.base_shift, self.max_shift) <= 0:
            raise ValueError("base_shift and max_shift must be above 0 if form is linear: they are the shift")


@dataclass(frozen=True)
class FlowMatchConfig:
    """Config of the scheduler `flow_match` (rectified flow)."""

    num_train_timesteps: Annotated[int, Range(ge=1)] = 1000  # timestep of pure noise
    shift: Annotated[float, Range(gt=0)] = 1.0  # moves timesteps towards noise; 3 to 8 for large clips
    timesteps: Literal["uniform", "logit_normal"] = (
        "uniform"  # density that training timesteps are drawn from, before the shift
    )
    logit_mean: float = 0.0  # mean of the logit-normal density
    logit_std: Annotated[float, Range(gt=0)] = 1.0  # standard deviation of the logit-normal density
    dynamic_shift: DynamicShift | None = None  # shift by the number of tokens; null: shift is used

    def __post_init__(self) -> None:
        if self.dynamic_shift is not None and self.shift != 1.0:
            raise ValueError("shift cannot be used with dynamic_shift, which sets it; remove one of the two")


@dataclass(frozen=True)
class PixelConfig:
    """Config of the autoencoder `pixel`: lossless space-to-depth and time-to-depth, without weights."""

    spatial: Annotated[int, Range(ge=1)] = 2  # pixels per latent, along height and along width
    temporal: Annotated[int, Range(ge=1)] = 1  # frames per latent


@dataclass(frozen=True)
class ByteTextConfig:
    """Config of the text encoder `bytes`: byte-level hidden states from fixed tables."""

    hidden_size: Annotated[int, Range(ge=2)] = 64  # width of a hidden state
    max_length: Annotated[int, Range(ge=2)] = 128  # tokens: one per byte, and one for the end


@dataclass(frozen=True)
class HFTextConfig:
    """Config of the text encoder `hf_text`: a Transformers model."""

    from_pretrained: InputPath  # folder with config.json and safetensors weights
    tokenizer: InputPath | None = None  # folder of the tokenizer; null: the same folder
    max_length: Annotated[int, Range(ge=1)] = 512  # tokens; longer captions are truncated
    dtype: DType = "bf16"  # dtype of the weights and the hidden states
