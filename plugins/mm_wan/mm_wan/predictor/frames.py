"""How each variant of Wan takes given frames of its clip, as in Diffusers' WanImageToVideoPipeline.

- Image-to-video models take more input channels: a mask, and the latents of a clip that is grey except for
  the given frames. Those of Wan 2.1 also take CLIP's features of these frames.
- TI2V takes the first frame's latents in place of the first noisy ones, at timestep 0.

Letters: B batch; C,T,H,W latents; F,Y,X pixels; N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mm_core.contracts import FrameNames, GivenFrames, PredictorInputs
from mm_core.errors import ContractError, plural
from mm_wan.presets import Architecture

TI2V_CHANNELS = 48
"""Channels of Wan 2.2 TI2V's latents. Nothing else in its architecture identifies it."""


def frame_choices(architecture: Architecture) -> tuple[FrameNames, ...]:
    """Sets of given frames (first, first and last, none) that a Wan transformer supports."""
    if architecture.in_channels > architecture.out_channels:
        if architecture.pos_embed_seq_len is not None:
            return (("first", "last"),)  # a position for CLIP's tokens of both
        if architecture.image_dim is not None:
            return (("first",),)
        return (("first",), ("first", "last"))
    if architecture.out_channels == TI2V_CHANNELS:
        return (("first",), ())
    return ((),)


def padded_clip(frames: Sequence[Tensor], num_frames: int) -> Tensor:
    """Builds the clip that Wan's autoencoder encodes for given frames: those frames, and grey for the others.

    Args:
        frames: the first frame, or the first and the last; each [B,3,Y,X].
        num_frames: frames of the clip.

    Returns:
        Pixels [B,3,F,Y,X].

    Raises:
        ContractError: all frames of the clip are given.
    """
    if num_frames <= len(frames):
        raise ContractError(
            f"no frames are left to predict: the clip has {plural(num_frames, 'frame')}, "
            f"and {len(frames)} of them {'are' if len(frames) > 1 else 'is'} given",
            where="num_frames",
            accepted="5 or more",
        )
    first, *last = (frame[:, :, None] for frame in frames)
    grey = first.new_zeros(*first.shape[:2], num_frames - len(frames), *first.shape[3:])
    return torch.cat([first, grey, *last], dim=2)


def beside(latents: Tensor, timestep: Tensor, given: GivenFrames, mask_channels: int) -> PredictorInputs:
    """Gives frames to a Wan image-to-video model as extra input channels: a mask, then the frames' latents.

    Args:
        latents: noisy latents [B,C,T,H,W].
        timestep: [B].
        given: the given frames.
        mask_channels: channels of the mask, one per frame of pixels in a latent.
    """
    batch, _, t, h, w = latents.shape
    mask = latents.new_zeros(batch, mask_channels, t, h, w)
    mask[:, :, 0] = 1
    if "last" in given.names:
        mask[:, -1, -1] = 1
    conditions = {"image_latents": torch.cat([mask, given.latents.to(latents)], dim=1)}
    if given.features is not None:
        conditions["image_embeds"] = given.features
    return PredictorInputs(latents, timestep, conditions)


def in_place(
    latents: Tensor, timestep: Tensor, given: GivenFrames, patch_size: tuple[int, int, int]
) -> PredictorInputs:
    """Gives the first frame to Wan 2.2 TI2V in place of the first noisy latent: its tokens have timestep
    0, and the loss ignores them.

    Args:
        latents: noisy latents [B,C,T,H,W].
        timestep: [B].
        given: the given frame.
        patch_size: latents per token along (t, h, w).

    Raises:
        ContractError: the clip has one latent only, so nothing is left to predict.
    """
    t, h, w = latents.shape[2:]
    if t < 2:
        raise ContractError(
            "no frames are left to predict: the clip has one latent, which holds the given first frame",
            where="num_frames",
            accepted="5 or more",
        )
    rows, columns = h // patch_size[1], w // patch_size[2]
    noisy = torch.arange(t // patch_size[0], device=latents.device).repeat_interleave(rows * columns) > 0
    counts = torch.ones(1, 1, t, h, w, dtype=torch.bool, device=latents.device)
    counts[:, :, 0] = False
    known = torch.cat([given.latents.to(latents), latents[:, :, 1:]], dim=2)
    return PredictorInputs(known, noisy.float() * timestep.float()[:, None], counts=counts)
