"""Configs of the predictors `wan/transformer` and `wan/two_expert`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.plugin import InputPath, Range
from mm_wan.presets import LARGEST, LARGEST_HEAD, MOST_LAYERS, MOST_POSITIONS

_Size = Annotated[int, Range(ge=1, le=LARGEST)]

PresetName = Literal[
    "wan2.1-t2v-1.3b",
    "wan2.1-t2v-14b",
    "wan2.1-i2v-14b-480p",
    "wan2.1-i2v-14b-720p",
    "wan2.1-flf2v-14b-720p",
    "wan2.2-t2v-a14b",
    "wan2.2-i2v-a14b",
    "wan2.2-ti2v-5b",
]


TwoExpertPresetName = Literal["wan2.2-t2v-a14b", "wan2.2-i2v-a14b"]
Train = Literal["both", "high", "low"]


@dataclass(frozen=True)
class ArchitectureConfig:
    """Fields of Wan's transformer. Default of each field: the value of the folder or preset; without either,
    the default of Diffusers' class (14B text-to-video)."""

    patch_size: tuple[_Size, _Size, _Size] | None = None  # latents per token along (t, h, w)
    num_attention_heads: _Size | None = None  # the width is num_attention_heads * attention_head_dim
    attention_head_dim: Annotated[int, Range(ge=1, le=LARGEST_HEAD)] | None = (
        None  # channels per head; even, at least 6
    )
    in_channels: _Size | None = (
        None  # input channels of the first layer: those of the latents and of frames given with them
    )
    out_channels: _Size | None = None  # channels of the prediction: those of the latents
    text_dim: _Size | None = None  # width of the text encoder's hidden states
    freq_dim: _Size | None = None  # width of the timestep's sinusoids
    ffn_dim: _Size | None = None  # inner width of the feed-forward
    num_layers: Annotated[int, Range(ge=1, le=MOST_LAYERS)] | None = None  # transformer blocks
    cross_attn_norm: bool | None = None  # layer norm before the cross-attention
    qk_norm: Literal["rms_norm_across_heads"] | None = None  # norm of queries and keys; Wan has only this one
    eps: Annotated[float, Range(gt=0)] | None = None  # epsilon of all norms
    image_dim: _Size | None = None  # width of CLIP's image features; null: the model takes none
    added_kv_proj_dim: _Size | None = (
        None  # width of the image's keys and values: the model's width, if it takes image features
    )
    rope_max_seq_len: Annotated[int, Range(ge=1, le=MOST_POSITIONS)] | None = (
        None  # largest number of tokens along one axis that the rotary tables cover
    )
    pos_embed_seq_len: _Size | None = None  # image tokens of first and last frame together (first-last-frame)


@dataclass(frozen=True)
class WanTransformerConfig(ArchitectureConfig):
    """Wan's diffusion transformer (https://arxiv.org/abs/2503.20314), from a folder, from the name of a
    published architecture, or from its fields. Default of each field: the value of the folder or preset;
    without either, the default of Diffusers' class (14B text-to-video)."""

    from_pretrained: InputPath | None = None  # a pipeline, its transformer or Wan-AI's folder; a file
    preset: PresetName | None = None  # published architecture; the folder must have the same


@dataclass(frozen=True)
class ExpertPaths:
    """The two experts of Wan 2.2 in one file each, as ComfyUI publishes them, both in one folder."""

    high: str  # file of the expert for high noise, with `high` in its name
    low: str  # file of the expert for low noise, with `low` in its name


@dataclass(frozen=True)
class TwoExpertConfig(ArchitectureConfig):
    """Wan 2.2 A14B: two transformers of one architecture, one for high noise and one for low noise."""

    from_pretrained: InputPath | ExpertPaths | None = (
        None  # folder of a pipeline, or in Wan-AI's layout, with both experts; or a file of each
    )
    preset: TwoExpertPresetName | None = None  # published pair; the folder must hold the same architecture
    boundary: Annotated[float, Range(gt=0, lt=1)] | None = (
        None  # share of the timesteps where `high` begins; null: from the folder or preset, or as published
    )
    train: Train = "both"  # experts to train; an untrained one takes memory only while clips are sampled
