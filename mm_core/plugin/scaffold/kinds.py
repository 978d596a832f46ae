"""What a new plugin gets for each kind of component: its class, its small instance and its place in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_CLIPS = "num_frames: 8, height: 16, width: 16"
SHAPES = "{type: shapes, " + _CLIPS + "}"
"""The dataset of runs of a new plugin: clips that need no download."""
_VALIDATION = MappingProxyType({"data.validation": "{type: shapes, " + _CLIPS + ", clips: 32, seed: 1}"})


_CLIPS_IN_FILES = """
type: video_text
annotations: data/clips/data.json  # a list of your clips: [{"path": "a.mp4", "cap": "a caption"}, ...]
num_frames: 8
height: 16
width: 16"""
_WAN = """
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


@dataclass(frozen=True)
class KindTemplate:
    """The template of a kind of component; its module is `templates/kinds/<kind>.py.txt`.

    Attributes:
        target: name of the class in the module.
        words: what the module contains, for the README.
        tiny: fields of the small instance for tests.
        declaration: further arguments of its Component, as Python.
        run: keys of the config, with dots, and their values as YAML; $type is the component's name.
        steps: length of the run of its config.
        about: description of the run in its config.
        then: the command that uses the component after the run.
        requires: packages that the module imports besides mm_core's own.
    """

    target: str
    words: str
    tiny: Mapping[str, object] = field(default_factory=dict)
    declaration: str = ""
    run: Mapping[str, str] = field(default_factory=dict)
    steps: int = 300
    about: str = "on clips of moving shapes that need no download"
    then: str = ""
    requires: tuple[str, ...] = ()


TEMPLATES: Mapping[str, KindTemplate] = MappingProxyType(
    {
        "predictor": KindTemplate(
            "DiT",
            "a diffusion transformer",
            {"in_channels": 4, "text_dim": 8, "width": 24, "depth": 2, "heads": 2},
            run={"task.predictor": "{type: $type, in_channels: 12, text_dim: 64, patch_size: [8, 1, 1]}"},
            steps=1500,
        ),
        "autoencoder": KindTemplate(
            "Haar", "an autoencoder", run={"task.autoencoder": "{type: $type}  # 12 channels"}
        ),
        "text_encoder": KindTemplate(
            "Words",
            "a text encoder",
            {"hidden_size": 16},
            run={"task.text_encoder": "{type: $type, hidden_size: 64}"},
        ),
        "image_encoder": KindTemplate(
            "Colours",
            "an image encoder",
            {"hidden_size": 16},
            run={"task.predictor": _WAN, "task.image_encoder": "{type: $type, hidden_size: 64}"},
        ),
        "scheduler": KindTemplate("Flow", "a noise scheduler", run={"task.scheduler": "{type: $type}"}),
        "dataset": KindTemplate(
            "Stripes",
            "a dataset of clips",
            {"num_frames": 4, "height": 8, "width": 16, "clips": 6},
            run={"data.train": "{type: $type, " + _CLIPS + "}"},
        ),
        "task": KindTemplate(
            "NextFrame",
            "a task",
            {"width": 4},
            'examples="$package.task:examples"',
            run={"task": "{type: $type}"},
        ),
        "engine": KindTemplate(
            "ReplicatedEngine",
            "an engine",
            {"recompute_modules": ["net.blocks.{*}"]},  # of the task in `mm plugins test`
            run={"engine": '{type: $type, recompute_modules: ["predictor.blocks.{*}"]}'},
        ),
        "optimizer": KindTemplate(
            "Lion",
            "an optimizer",
            declaration='capabilities={"state_tensors": 1}',
            run={"optimizer": "{type: $type, lr: 3.0e-4}"},
        ),
        "lr_schedule": KindTemplate(
            "InverseSquareRoot",
            "a learning-rate schedule",
            {"warmup_steps": 4},
            run={"lr_schedule": "{type: $type, warmup_steps: 50}"},
        ),
        "tracker": KindTemplate(
            "CsvTracker", "a tracker", run={"log": "{every: 1, trackers: [{type: $type}]}"}
        ),
        "video_reader": KindTemplate(
            "PatientReader",
            "a video reader",
            {"pause": 0.0},
            run={"data.train": f"{_CLIPS_IN_FILES}\nreader: {{type: $type}}"},
        ),
        "transform": KindTemplate(
            "WithoutBars",
            "a transform",
            {"darkest": 8},
            run={"data.train": f"{_CLIPS_IN_FILES}\ntransform: {{type: $type}}"},
        ),
        "weight_format": KindTemplate(
            "Renamed",
            "a weight format",
            then="mm export --run runs/${type}_weight_format --out exported --to $type",
            declaration='examples="$package.weight_format:examples"',
        ),
        "metric": KindTemplate(
            "Outliers",
            "a metric",
            run={**_VALIDATION, "validation": "{every: 50, metrics: [{type: $type}]}"},
        ),
        "callback": KindTemplate(
            "BestLoss",
            "a callback",
            run={**_VALIDATION, "validation": "{every: 50}", "callbacks": "[{type: $type}]"},
        ),
    }
)
"""Kind of component -> its template. A test compares the kinds with `KINDS`."""
