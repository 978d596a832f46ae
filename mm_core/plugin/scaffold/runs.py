"""The runs of a new plugin's configs: what its components are trained with and on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CLIPS = "num_frames: 8, height: 16, width: 16"
SHAPES = "{type: shapes, " + CLIPS + "}"
"""The dataset of runs of a new plugin: clips that need no download."""
VALIDATION = MappingProxyType({"data.validation": "{type: shapes, " + CLIPS + ", clips: 32, seed: 1}"})


CLIPS_IN_FILES = """
type: video_text
annotations: data/clips/data.json  # a list of your clips: [{"path": "a.mp4", "cap": "a caption"}, ...]
num_frames: 8
height: 16
width: 16"""
WAN = """
type: wan/transformer  # of mm-wan
num_layers: 1
num_attention_heads: 2
attention_head_dim: 24
in_channels: 28  # 12 of the noisy latents, 12 of the first frame, 4 of a mask
out_channels: 12
text_dim: 64
freq_dim: 32
ffn_dim: 64
image_dim: 64
added_kv_proj_dim: 48"""
SHIPPED_PREDICTOR = """
type: custom_dit  # of mm-custom-dit
num_layers: 4
num_heads: 4
head_dim: 32
patch_size: [8, 1, 1]
in_channels: 12
out_channels: 12
text_dim: 64
rope_max_seq_len: 32"""
"""The predictor of runs of a plugin that has none, from mm-custom-dit."""
RUN: Mapping[str, str] = MappingProxyType(
    {
        "task.type": "text_to_video",
        "task.predictor": SHIPPED_PREDICTOR,
        "task.autoencoder": "{type: pixel, spatial: 2}",
        "task.text_encoder": "{type: bytes, hidden_size: 64}",
        "task.scheduler": "{type: flow_match, shift: 5, timesteps: uniform}",
        "data.train": SHAPES,
        "data.loader": "{workers: 0}",
        "optimizer": "{type: adamw, lr: 2.0e-3}",
        "lr_schedule": "{type: cosine, warmup_fraction: 0.05}",
    }
)
"""The run of each config, but for the keys that the kind changes: it needs no download."""
GUIDED: Mapping[str, str] = MappingProxyType(
    {"task.caption_dropout": "0.1", "task.sample": "{steps: 20, guidance: 3.0}"}
)
"""The last keys of a task that samples with guidance."""
