"""Reads the folder of an AutoencoderKLWan: which layers its config.json describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mm_core.contracts import empty_parameters
from mm_core.errors import CheckpointError, plural

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

CLASS = "AutoencoderKLWan"
STEM = "diffusion_pytorch_model"
FRAMES_A_LATENT = 4
"""Frames that AutoencoderKLWan encodes at a time, after the first frame."""


def pipeline_part(folder: Path, name: str) -> Path:
    """The folder of one part (such as `vae`) of a Wan pipeline, given that folder or the pipeline's."""
    return folder / name if (folder / "model_index.json").is_file() else folder


def layers_of(config: Mapping[str, Any], described: Path) -> tuple[int, tuple[int, int, int]]:
    """Channels and stride of the Wan autoencoder that a config.json describes.

    Args:
        config: content of config.json. Missing keys have AutoencoderKLWan's defaults.
        described: config.json, or the one file of the weights, for errors.

    Returns:
        Channels of the latents; frames, rows and columns of pixels per latent.

    Raises:
        CheckpointError: no such autoencoder can be built, or it does not encode 4 frames per latent.
    """
    try:
        channels = int(config.get("z_dim", 16))
        levels, halves = config.get("dim_mult", (1, 2, 4, 4)), config.get("temperal_downsample", (0, 1, 1))
        frames, shrink = 2 ** sum(map(bool, halves)), 2 ** (len(levels) - 1) * (config.get("patch_size") or 1)
    except (TypeError, ValueError) as fault:
        raise _no_model(fault, described) from fault
    if frames != FRAMES_A_LATENT:
        raise CheckpointError(
            f"the autoencoder has {plural(frames, 'frame')} per latent, but "
            f"{CLASS} encodes {FRAMES_A_LATENT} at a time",
            where=str(described),
            accepted=f"a temperal_downsample that gives {FRAMES_A_LATENT} frames per latent",
        )
    return channels, (frames, shrink, shrink)


def is_numbers(*given: object, count: int) -> bool:
    """Whether each value from an autoencoder's config.json is a sequence of `count` finite numbers."""
    return all(
        isinstance(one, list | tuple)
        and len(one) == count
        and all(type(number) in (int, float) and math.isfinite(number) for number in one)
        for one in given
    )


def _no_model(fault: Exception, described: Path) -> CheckpointError:
    return CheckpointError(
        f"{described.name} describes no autoencoder that Diffusers can build: {fault}",
        where=str(described),
        hint="copy the file again from where the weights came from, or choose another folder",
    )


def empty_model(config: Mapping[str, object], described: Path, dtype: torch.dtype) -> AutoencoderKLWan:
    """Builds a Wan autoencoder without memory for its parameters.

    Args:
        config: content of config.json.
        described: config.json, or the one file of the weights, for errors.
        dtype: dtype of the parameters.

    Raises:
        CheckpointError: Diffusers cannot build an autoencoder from this config.
    """
    from diffusers import AutoencoderKLWan

    try:
        with empty_parameters():
            model = AutoencoderKLWan.from_config(dict(config))
    except (TypeError, ValueError, LookupError, AssertionError, RuntimeError, AttributeError) as fault:
        raise _no_model(fault, described) from fault
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
