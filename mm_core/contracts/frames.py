"""Image-to-video: predictors that are shown frames of the clip, and encoders of images.

Letters as in `mm_core.contracts.components`; N tokens of the predictor, K tokens of an image, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from mm_core.contracts.components import Frozen

FrameName = Literal["first", "last"]
FrameNames = tuple[FrameName, ...]
"""Which frames of a clip are given, in their order: (), ("first",) or ("first", "last")."""


@dataclass(frozen=True)
class GivenFrames:
    """Frames of a clip, encoded.

    names: which ones, at least one. latents: [B,C,T',H,W] float32, what the autoencoder makes of
    `SupportsFrames.frames_clip` (its mode). features: [B,K,D] float32 of the image encoder, the frames'
    one behind the other; None where the predictor takes none.
    """

    names: FrameNames
    latents: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class PredictorInputs:
    """What a forward takes beside the text.

    latents: [B,C,T,H,W]; those that are known from given frames stand in their place. timestep: [B], or
    [B,N] one a token. conditions: further tensors by the name of the forward's argument. counts: bool
    [1,1,T,H,W], true where the prediction means something; None: everywhere.
    """

    latents: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None

    def repeat(self, times: int) -> PredictorInputs:
        """The rows `times` times, one block behind the other."""
        return replace(
            self,
            latents=_repeat(self.latents, times),
            timestep=_repeat(self.timestep, times),
            conditions={name: _repeat(tensor, times) for name, tensor in self.conditions.items()},
        )


def _repeat(rows: Tensor, times: int) -> Tensor:
    return rows.repeat(times, *[1] * (rows.dim() - 1))


@runtime_checkable
class SupportsFrames(Protocol):
    """A predictor that may be shown frames of the clip that it predicts. Both methods are pure: they read no
    parameter, and are called outside the forward.

    frame_choices: the sets of frames that it can be given; the first is what it is trained with unless the
        task says otherwise. `()` among them means that it also works from text alone.
    image_dim: width of the image encoder's features that it takes with given frames; None: it takes none.
    """

    frame_choices: tuple[FrameNames, ...]
    image_dim: int | None

    def frames_clip(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        """The pixels[B,3,F',Y,X] that the autoencoder encodes, from the given frames (each [B,3,Y,X] in
        [-1,1], in their order) of a clip of `num_frames`."""

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        """What the forward takes of latents[B,C,T,H,W] at timestep[B] (in model units) and given frames.

        Its latents are those of the clip: after the last step of sampling they are taken once more, so that
        what is known stays as it was given.
        """


@runtime_checkable
class ImageEncoder(Frozen, Protocol):
    """Images -> hidden states, for predictors with an `image_dim`.

    tokens: K, of one image; None where that is not known: the plan then tells no operations.
    """

    hidden_size: int
    tokens: int | None

    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """B images, each uint8 [3,Y,X] of any size -> hidden[B,K,D]."""
