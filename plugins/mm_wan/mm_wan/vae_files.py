"""What the folder of an AutoencoderKLWan holds: its layers by config.json, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mm_core.errors import CheckpointError
from mm_core.weights import KeyMap, open_stored
from mm_core.weights.fitting import Fit, fit
from mm_core.weights.streaming import stream

CLASS = "AutoencoderKLWan"
STEM = "diffusion_pytorch_model"
FRAMES_A_LATENT = 4
"""That AutoencoderKLWan encodes at a time, after the first."""


def pipeline_part(folder: Path, name: str) -> Path:
    """The folder of one model, also where the pipeline's folder is given."""
    return folder / name if (folder / "model_index.json").is_file() else folder


def layers_of(config: Mapping[str, Any], folder: Path) -> tuple[int, tuple[int, int, int]]:
    """Channels and stride of the layers that config.json describes, with AutoencoderKLWan's defaults."""
    try:
        channels = int(config.get("z_dim", 16))
        levels, halves = config.get("dim_mult", (1, 2, 4, 4)), config.get("temperal_downsample", (0, 1, 1))
        frames, shrink = 2 ** sum(map(bool, halves)), 2 ** (len(levels) - 1) * (config.get("patch_size") or 1)
    except (TypeError, ValueError) as fault:
        raise _no_model(fault, folder) from fault
    if frames != FRAMES_A_LATENT:
        raise CheckpointError(
            f"the autoencoder takes {frames} frames a latent, and "
            f"{CLASS} encodes {FRAMES_A_LATENT} at a time",
            where=str(folder / "config.json"),
        )
    return channels, (frames, shrink, shrink)


def _no_model(fault: Exception, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"config.json describes no autoencoder that Diffusers can build: {fault}",
        where=str(folder / "config.json"),
    )


def empty_model(config: Mapping[str, Any], folder: Path) -> Any:
    """An AutoencoderKLWan with its parameters on the meta device and its buffers real."""
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKLWan

    try:
        with init_empty_weights(include_buffers=False):
            return AutoencoderKLWan.from_config(dict(config))
    except (TypeError, ValueError, LookupError, AssertionError, RuntimeError, AttributeError) as fault:
        raise _no_model(fault, folder) from fault


def read_into(model: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Streams the weights of `folder`. CheckpointError unless they are exactly the model's."""
    stored = open_stored(folder, STEM)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    way = fit(KeyMap(), shapes, stored)
    if not way.whole:
        raise CheckpointError(f"the weights are not this autoencoder's: {_misfit(way)}", where=str(folder))
    state = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    stream(state, way.pieces)
    model.load_state_dict(state, assign=True)
    model.to(device)


def _misfit(way: Fit) -> str:
    if way.misshapen:
        name, wanted, found = way.misshapen[0]
        return f"{name} has shape {found}, not {wanted}"
    more_than_asked = tuple(name for _, name in way.unexpected)
    names, word = (way.missing, "lack") if way.missing else (more_than_asked, "also have")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"they {word} {', '.join(names[:3])}{more}"
