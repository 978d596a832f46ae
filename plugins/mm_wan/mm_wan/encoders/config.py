"""Configs of the frozen encoders `wan/vae`, `wan/umt5` and `wan/clip_vision`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.plugin import DType, Range

_Size = Annotated[int, Range(ge=1)]


@dataclass(frozen=True)
class TilingParam:
    """Tiles that larger clips are cut into, as `AutoencoderKLWan.enable_tiling` takes them. All four are
    multiples of the autoencoder's spatial stride. Tiles change the latents a little at their seams. The
    48-channel autoencoder encodes patches of 2x2 pixels, and Diffusers counts its tiles in these there."""

    tile_sample_min_height: _Size = 256  # pixels of a tile, down
    tile_sample_min_width: _Size = 256  # pixels of a tile, across
    tile_sample_stride_height: _Size = 192  # pixels from a tile to the next one down; the rest is blended
    tile_sample_stride_width: _Size = 192  # pixels from a tile to the next one across


@dataclass(frozen=True)
class WanVAEConfig:
    """The causal video autoencoder of Wan 2.1 (16 channels) and Wan 2.2 TI2V (48 channels)."""

    from_pretrained: str  # folder with config.json and safetensors: a pipeline's `vae`, or the pipeline's
    dtype: DType = "fp32"  # of the weights and the layers; latents come in fp32
    latent_channels: _Size | None = None  # what is expected: 16 or 48; none: whatever config.json says
    tiling: bool = False  # cuts clips larger than a tile into tiles: less memory, more time
    tiling_param: TilingParam = field(default_factory=TilingParam)  # sizes of the tiles
    slicing: bool = False  # one clip of a batch at a time: less memory, more time
    norm_latents: bool = True  # brings latents to unit scale, which the predictors are trained on
    norm_mode: Literal["channel_specified_shift_scale", "value_shift_scale"] = (
        "channel_specified_shift_scale"  # (x - latents_mean) / latents_std of config.json, or scalars
    )
    shift_factor: float | None = None  # of value_shift_scale: (x - shift_factor) * scaling_factor; none: 0
    scaling_factor: Annotated[float, Range(gt=0)] | None = None  # of value_shift_scale, which needs it
    do_sample: bool | None = (
        None  # latents trained on: of the posterior a sample, or the mode; none: task.latents
    )


@dataclass(frozen=True)
class WanUMT5Config:
    """The UMT5 encoder of Wan, fed as Wan's pipelines feed it."""

    from_pretrained: str  # folder with config.json and safetensors: a pipeline's `text_encoder`, or its own
    tokenizer: str | None = None  # folder; none: that of the weights, else `tokenizer` beside it
    max_length: _Size = 512  # tokens; longer captions are cut, all are padded to it
    dtype: DType = "bf16"  # of the weights and the hidden states


@dataclass(frozen=True)
class WanCLIPVisionConfig:
    """The CLIP image encoder of Wan 2.1's image-to-video models, fed as their pipelines feed it."""

    from_pretrained: str  # folder with config.json and safetensors: a pipeline's `image_encoder`, or its own
    processor: str | None = None  # folder; none: that of the weights, else `image_processor` beside it
    dtype: DType = "fp32"  # of the weights and the hidden states; Wan's pipelines are published with fp32
