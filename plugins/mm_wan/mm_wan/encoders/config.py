"""Configs of the frozen encoders `wan/vae`, `wan/umt5` and `wan/clip_vision`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.plugin import DType, InputPath, Range

_Size = Annotated[int, Range(ge=1)]


@dataclass(frozen=True)
class TilingParam:
    """Sizes of the tiles into which larger clips are cut, as arguments of `AutoencoderKLWan.enable_tiling`.
    All four are multiples of the autoencoder's spatial stride. Latents differ slightly at the seams. The
    48-channel autoencoder encodes patches of 2x2 pixels, and there Diffusers counts tiles in patches."""

    tile_sample_min_height: _Size = 256  # height of a tile in pixels
    tile_sample_min_width: _Size = 256  # width of a tile in pixels
    tile_sample_stride_height: _Size = 192  # pixels from one tile down to the next; overlaps are blended
    tile_sample_stride_width: _Size = 192  # pixels from one tile across to the next; overlaps are blended


@dataclass(frozen=True)
class WanVAEConfig:
    """The causal video autoencoder of Wan 2.1 (16 channels) and Wan 2.2 TI2V (48 channels)."""

    from_pretrained: InputPath  # folder of a pipeline or its `vae`; or Wan2.1_VAE.pth and the like
    dtype: DType = "fp32"  # dtype of weights and layers; latents are always fp32
    latent_channels: _Size | None = (
        None  # expected channels of the latents, 16 or 48; null: as in config.json
    )
    tiling: bool = False  # cut clips larger than a tile into tiles: less memory, more time
    tiling_param: TilingParam = field(default_factory=TilingParam)  # sizes of the tiles
    slicing: bool = False  # encode one clip of a batch at a time: less memory, more time
    norm_latents: bool = True  # scale latents to unit variance, as the published predictors expect
    norm_mode: Literal["channel_specified_shift_scale", "value_shift_scale"] = (
        "channel_specified_shift_scale"  # (x - latents_mean) / latents_std from config.json, or scalars
    )
    shift_factor: float | None = None  # for value_shift_scale: (x - shift_factor) * scaling_factor; null: 0
    scaling_factor: Annotated[float, Range(gt=0)] | None = None  # for value_shift_scale, where it is required
    do_sample: bool | None = (
        None  # train on a sample of the posterior (true) or on its mode (false); null: as task.latents
    )


@dataclass(frozen=True)
class WanUMT5Config:
    """The UMT5 text encoder of Wan, with inputs as in Wan's pipelines."""

    from_pretrained: InputPath  # a pipeline's `text_encoder`, or a folder or file of its own
    tokenizer: InputPath | None = None  # its folder; null: the weights' folder, or one beside the weights
    max_length: _Size = 512  # tokens per caption; longer captions are cut, shorter ones padded
    dtype: DType = "bf16"  # dtype of weights and hidden states


@dataclass(frozen=True)
class WanCLIPVisionConfig:
    """The CLIP image encoder of Wan 2.1's image-to-video models, with inputs as in their pipelines."""

    from_pretrained: InputPath  # a pipeline's `image_encoder`, or its own folder; with config.json
    processor: InputPath | None = (
        None  # processor folder; null: the weights' folder, else `image_processor` beside it
    )
    dtype: DType = "fp32"  # dtype of weights and hidden states; Wan's pipelines are published with fp32
