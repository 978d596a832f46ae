"""Tiny image-to-video checkpoints whose every weight counts, runs that begin with them, and images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import yaml
from mm_wan.schedulers.flow_match import WanFlowMatch
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file

from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.interchange.import_weights import import_weights
from support.runs import load_task

FILE = "transformer/diffusion_pytorch_model.safetensors"


def checkpoint_at(folder: Path, variant: str) -> Path:
    """A pipeline's folder.

    Args:
        folder: where it is made.
        variant: a variant of `make_tiny_checkpoint`, or `i2v_2.2`: without image features.
    """
    make_tiny_checkpoint(folder, variant.removesuffix("_2.2"), image_encoder=variant != "i2v_2.2")
    generator = torch.Generator().manual_seed(4)
    weights = {
        name: w + (0.2 if w.dim() > 1 else 0.1) * torch.randn(w.shape, generator=generator)
        for name, w in load_file(folder / FILE).items()
    }
    save_file(weights, folder / FILE, {"format": "pt"})
    return folder


def images_at(folder: Path) -> list[Path]:
    """Three images of soft colours, none of the shape of a clip."""
    paths = []
    for seed, size in enumerate(((70, 50), (44, 40), (31, 90))):
        coarse = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
        paths.append(folder / f"{seed}.png")
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def document(top: Path, folder: Path, variant: str) -> dict:
    """A run's config as a YAML holds it; its clips do not exist."""
    task = {
        "type": "text_to_video",
        "predictor": {
            "type": "wan/two_expert" if variant.endswith("high_low") else "wan/transformer",
            "from_pretrained": str(folder),
        },
        "autoencoder": {"type": "wan/vae", "from_pretrained": str(folder)},
        "text_encoder": {"type": "wan/umt5", "from_pretrained": str(folder), "dtype": "fp32"},
        "scheduler": {"type": "wan/flow_match"},
    }
    if (folder / "image_encoder").is_dir():
        task["image_encoder"] = {"type": "wan/clip_vision", "from_pretrained": str(folder)}
    clips = {"annotations": str(top / "none.json"), "num_frames": 5, "height": 32, "width": 64, "fps": 8}
    return {
        "run": {"name": variant, "dir": str(top / "runs")},
        "task": task,
        "data": {"train": {"type": "video_text", **clips}},
        "train": {"steps": 1},
    }


def config_at(top: Path, folder: Path, variant: str) -> RunConfig:
    path = top / f"{variant}.yaml"
    path.write_text(yaml.safe_dump(document(top, folder, variant)), encoding="utf-8")
    return load_config(path)


def maker(top: Path) -> Callable[[str], SimpleNamespace]:
    """Makes what tests of a variant share, once: its checkpoint, a run that began with it, the run's task,
    and images."""
    images = images_at(top)
    known: dict[str, SimpleNamespace] = {}

    def make(variant: str) -> SimpleNamespace:
        if variant not in known:
            folder = checkpoint_at(top / variant, variant)
            config = config_at(top, folder, variant)
            saved, _ = import_weights(config, folder)
            task = load_task(config, saved, "model")
            known[variant] = SimpleNamespace(
                folder=folder, config=config, run=top / "runs" / variant, task=task, images=images
            )
        known[variant].task.scheduler = WanFlowMatch()
        return known[variant]

    return make


def replace_task(config: RunConfig, **options: object) -> RunConfig:
    """The same run with other options of its task."""
    return replace(config, task=replace(config.task, options={**config.task.options, **options}))
