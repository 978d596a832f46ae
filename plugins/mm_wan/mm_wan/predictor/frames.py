"""How each variant of Wan is shown frames of its clip, as Diffusers' WanImageToVideoPipeline does it.

- Image-to-video models take, below the noisy latents, a mask and the latents of a clip that is grey but for
  the given frames; Wan 2.1's also CLIP's features of these frames.
- TI2V takes the first frame's latents in the place of the noisy ones, at timestep 0.

Letters: B batch; C,T,H,W latents; F,Y,X pixels; N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mm_core.contracts import FrameNames, GivenFrames, PredictorInputs
from mm_core.errors import ContractError
from mm_wan.presets import Architecture

TI2V_CHANNELS = 48
"""Of the latents of Wan 2.2's TI2V, whose architecture has no other mark."""


def frame_choices(architecture: Architecture) -> tuple[FrameNames, ...]:
    """The sets of frames that a transformer of this architecture can be given."""
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
    """pixels[B,3,F,Y,X]: the first (and last) frame[B,3,Y,X] of a clip, and grey between or behind."""
    if num_frames <= len(frames):
        raise ContractError(
            f"a clip of {num_frames} frames has none left to predict where {len(frames)} are given",
            where="num_frames",
            accepted="5 or more",
        )
    first, *last = (frame[:, :, None] for frame in frames)
    grey = first.new_zeros(*first.shape[:2], num_frames - len(frames), *first.shape[3:])
    return torch.cat([first, grey, *last], dim=2)


def beside(latents: Tensor, timestep: Tensor, given: GivenFrames, mask_channels: int) -> PredictorInputs:
    """A mask of a channel for each frame of pixels in a latent, over the given clip's latents."""
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
    """The first latent as it is given, its tokens at timestep 0, and no part of the loss."""
    t, h, w = latents.shape[2:]
    if t < 2:
        raise ContractError(
            "a clip of one latent has none left to predict where the first frame is given",
            where="num_frames",
            accepted="5 or more",
        )
    rows, columns = h // patch_size[1], w // patch_size[2]
    noisy = torch.arange(t // patch_size[0], device=latents.device).repeat_interleave(rows * columns) > 0
    counts = torch.ones(1, 1, t, h, w, dtype=torch.bool, device=latents.device)
    counts[:, :, 0] = False
    known = torch.cat([given.latents.to(latents), latents[:, :, 1:]], dim=2)
    return PredictorInputs(known, noisy.float() * timestep.float()[:, None], counts=counts)
