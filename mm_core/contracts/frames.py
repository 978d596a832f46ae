"""Protocols of image-to-video: predictors conditioned on frames of the clip, and image encoders.

Letters as in `mm_core.contracts.components`; N tokens of the predictor, K tokens of an image, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mm_core.contracts.components import Frozen

FrameName = Literal["first", "last"]
FrameNames = tuple[FrameName, ...]
"""The conditioning frames of a clip, in order: (), ("first",) or ("first", "last")."""


@dataclass(frozen=True)
class GivenFrames:
    """Encoded conditioning frames of clips.

    Attributes:
        names: which frames, at least one.
        latents: [B,C,T',H,W] float32, the autoencoder's mode for `SupportsFrames.frames_clip`.
        features: [B,K,D] float32 of the image encoder, concatenated over frames; None if the predictor does
            not use them.
    """

    names: FrameNames
    latents: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class PredictorInputs:
    """The inputs of a predictor's forward beside the text.

    Attributes:
        latents: [B,C,T,H,W], with the latents known from conditioning frames filled in.
        timestep: [B], or [B,N] per token.
        conditions: further tensors by argument name.
        counts: bool [1,1,T,H,W], or [B,1,T,H,W], true where the prediction is used; None: everywhere.
    """

    latents: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None

    def beside(self, other: PredictorInputs) -> PredictorInputs:
        """The rows of both, those of the other after one's own."""
        return replace(
            self,
            latents=torch.cat([self.latents, other.latents]),
            timestep=torch.cat([self.timestep, other.timestep]),
            conditions={n: torch.cat([own, other.conditions[n]]) for n, own in self.conditions.items()},
        )


@runtime_checkable
class SupportsFrames(Protocol):
    """Capability of a predictor that accepts conditioning frames of the clip that it predicts.

    Both methods are pure: they read no parameter, and are called outside the forward.

    Attributes:
        frame_choices: the accepted sets of frames; training uses the first one unless the task sets another.
            `()` means that the predictor also works from text alone.
        image_dim: width of the image encoder's features that it uses; None: it uses none.
    """

    frame_choices: tuple[FrameNames, ...]
    image_dim: int | None

    def frames_clip(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        """The pixels[B,3,F',Y,X] that the autoencoder encodes for conditioning frames.

        Args:
            frames: the frames, each [B,3,Y,X] in [-1,1], in order.
            num_frames: number of frames of the clip.
        """

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        """The inputs of the predictor's forward for latents with conditioning frames.

        The returned latents are those of the clip. Sampling calls this once more after its last step, so that
        known latents stay exactly as given.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B] in model units.
            given: the encoded frames.
        """


@runtime_checkable
class SupportsMaxFrames(Protocol):
    """Capability of a predictor that takes short clips or single images only.

    The plan refuses longer clips, and the conformance checks try no longer ones. Without it, a predictor
    takes clips of any length.

    Attributes:
        max_frames: most latent frames T that its forward takes; 1 for models of images.
    """

    max_frames: int


@runtime_checkable
class ImageEncoder(Frozen, Protocol):
    """An image encoder, from images to hidden states, for predictors with an `image_dim`.

    Attributes:
        hidden_size: width D of a hidden state.
        tokens: K, tokens per image; None: unknown, and the plan then contains no FLOPs.
    """

    hidden_size: int
    tokens: int | None

    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """Encodes B images, each uint8 [3,Y,X] of any size, into hidden[B,K,D]."""
