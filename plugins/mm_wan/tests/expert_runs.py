"""Tiny pipelines of two experts whose every weight counts, and runs that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from mm_wan.testing import make_tiny_checkpoint
from torch import nn

from mm_core.interchange.import_weights import import_weights
from support import runs
from support.runs import load_task

PARTS = {"high": "transformer", "low": "transformer_2"}
SOLVERS = ("unipc", "euler", "dpm++")


def pair_at(folder: Path, variant: str = "t2v_high_low") -> Path:
    """A whole tiny pipeline. Its two transformers differ, and answer to text and time."""
    make_tiny_checkpoint(folder, variant)
    for seed, part in enumerate(PARTS.values()):
        model = WanTransformer3DModel.from_pretrained(folder / part)
        shake(model, seed)
        model.save_pretrained(folder / part)
    return folder


def shake(model: nn.Module, seed: int, spread: float = 0.3) -> None:
    """Moves every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            size = spread if parameter.dim() > 1 else spread / 3
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def config_of(
    place: Path,
    folder: Path,
    name: str = "pair",
    *,
    train: str = "both",
    encoders: Path | None = None,
    adapters: Sequence[dict] = (),
):
    """A run without data of the experts in `folder`: what its dataset names does not exist.

    Args:
        place: folder of the run's YAML.
        folder: the experts.
        name: the run's name.
        train: as in the predictor's config.
        encoders: a pipeline's folder with the other parts; None: `folder`.
        adapters: the run's adapters.
    """
    encoders = encoders or folder
    task = {
        "type": "text_to_video",
        "predictor": {"type": "wan/two_expert", "from_pretrained": str(folder), "train": train},
        "autoencoder": {"type": "wan/vae", "from_pretrained": str(encoders / "vae")},
        "text_encoder": {
            "type": "wan/umt5",
            "from_pretrained": str(encoders / "text_encoder"),
            "dtype": "fp32",
        },
        "scheduler": {"type": "wan/flow_match", "sample_shift": 3.0},
    }
    clips = {"num_frames": 5, "height": 32, "width": 48}
    return runs.config_of(place, task, name, clips=clips, train={"epochs": 1, "adapters": list(adapters)})


def imported(place: Path, folder: Path, name: str = "pair", **options):
    """(the config, the checkpoint of step 0, the task with its weights)."""
    config = config_of(place, folder, name, **options)
    saved, _ = import_weights(config, folder)
    return config, saved, load_task(config, saved, "model")
