"""Given frames of an image-to-video model: frames of the clip in training, images in sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from mm_core.contracts import (
    Autoencoder,
    FrameNames,
    GivenFrames,
    ImageEncoder,
    Predictor,
    PredictorInputs,
    Randomness,
    SupportsFrames,
)
from mm_core.data.media.images import fit_image
from mm_core.errors import ContractError, plural
from mm_core.tasks.text_to_video.returned_shapes import expect_features, expect_latents

_PLACES = {"first": 0, "last": -1}
_BY_COUNT: tuple[FrameNames, ...] = ((), ("first",), ("first", "last"))


def choices(predictor: Predictor) -> tuple[FrameNames, ...]:
    """The sets of given frames that a predictor accepts; the first is its default for training."""
    return predictor.frame_choices if isinstance(predictor, SupportsFrames) else ((),)


def describe(names: FrameNames) -> str:
    """Given frames in words, for a message: `no frame`, `the first frame`, `the first and the last frame`."""
    return f"the {' and the '.join(names)} frame" if names else "no frame"


def image_dim(predictor: Predictor) -> int | None:
    """Width of the image features that a text-to-video predictor takes; None if it takes none."""
    return predictor.image_dim if isinstance(predictor, SupportsFrames) else None


@dataclass(frozen=True)
class ShownFrames:
    """The frames of a clip that a text-to-video predictor is shown, and what frozen components make of them.

    Attributes:
        predictor: the task's.
        autoencoder: encodes frames.
        image_encoder: encodes their features; None for a predictor that takes none.
        names: the frames given in training.
    """

    predictor: Predictor
    autoencoder: Autoencoder
    image_encoder: ImageEncoder | None
    names: FrameNames

    def of_clips(self, pixels: Tensor | None) -> GivenFrames | None:
        """Given frames taken from training clips, encoded; None without names.

        Args:
            pixels: [B,3,F,Y,X] in [-1,1]; None only without names.
        """
        if not self.names:
            return None
        assert pixels is not None
        latents = self.latents(pixels)
        return GivenFrames(self.names, latents, None if self._featureless else self.features(pixels))

    def of_images(
        self, images: Sequence[Sequence[Tensor]], size: tuple[int, int, int], device: torch.device
    ) -> GivenFrames | None:
        """Given frames made from the images of a sampling request, encoded; None without images.

        Args:
            images: for each clip the same number of images, uint8 [3,Y,X] of any size.
            size: (F, Y, X) of the clips.
            device: where to encode.
        """
        names = _BY_COUNT[len(images[0])] if images else ()
        if not names:
            return None
        originals = [[clip[place] for clip in images] for place in range(len(names))]
        frames = [torch.stack([fit_image(i, *size[1:]) for i in column]).to(device) for column in originals]
        latents = self._latents(frames, size[0])
        return GivenFrames(names, latents, None if self._featureless else self._features(originals))

    def latents(self, pixels: Tensor) -> Tensor:
        """The latents [B,C,T',H,W] of the given frames of clips [B,3,F,Y,X]."""
        return self._latents(self._taken(pixels), pixels.shape[2])

    def features(self, pixels: Tensor) -> Tensor:
        """The image encoder's features of the given frames of clips: [B,K,D], K over all frames."""
        bytes_ = (((f + 1) * 127.5).round().clamp(0, 255).to(torch.uint8) for f in self._taken(pixels))
        return self._features([list(frame) for frame in bytes_])

    @property
    def _featureless(self) -> bool:
        return image_dim(self.predictor) is None

    def _taken(self, pixels: Tensor) -> list[Tensor]:
        return [pixels[:, :, _PLACES[name]] for name in self.names]

    def _latents(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        assert isinstance(self.predictor, SupportsFrames)
        clip = self.predictor.frames_clip(frames, num_frames)
        shape = (len(clip), *self.autoencoder.latent_shape(*clip.shape[2:]))
        return expect_latents(self.autoencoder.encode(clip), shape, self.autoencoder)

    def _features(self, originals: Sequence[Sequence[Tensor]]) -> Tensor:
        encoder = self.image_encoder
        assert encoder is not None
        columns = (expect_features(encoder.encode(column), len(column), encoder) for column in originals)
        return torch.cat([*columns], dim=1)


def clip_digest(predictor: SupportsFrames, names: FrameNames) -> str:
    """A hash of what `frames_clip` makes of two small frames: it is code and settings of the predictor."""
    frames = [Randomness(0).normal((1, 3, 16, 16), "frames", name).clamp(-1, 1) for name in names]
    clip = predictor.frames_clip(frames, 5)
    return hashlib.sha256(clip.contiguous().numpy().tobytes() + repr(clip.shape).encode()).hexdigest()[:16]


def inputs_of(
    predictor: Predictor,
    latents: Tensor,
    timestep: Tensor,
    given: GivenFrames | None,
    conditions: Mapping[str, Tensor] = MappingProxyType({}),
) -> PredictorInputs:
    """The predictor's arguments without the text: latents, timesteps, given frames and other conditions.

    Args:
        predictor: the task's predictor.
        latents: [B,C,T,H,W].
        timestep: [B], in model units.
        given: frames to show the predictor, or None.
        conditions: further tensors by name; those of the given frames have priority.
    """
    if given is None:
        return PredictorInputs(latents, timestep, conditions)
    assert isinstance(predictor, SupportsFrames)
    inputs = predictor.with_frames(latents, timestep, given)
    return replace(inputs, conditions={**conditions, **inputs.conditions})


def check_images(predictor: Predictor, images: Sequence[Sequence[Tensor]], prompts: int) -> None:
    """Checks the images of a sampling request: as many as the predictor takes, equally many for each clip.

    Raises:
        ContractError: the number of images does not match.
    """
    rows = images or [()] * prompts
    if len(rows) != prompts:
        raise ContractError(
            f"there are {plural(prompts, 'prompt')}, but images for {plural(len(rows), 'clip')}",
            where="images",
            accepted="one list of images for each prompt",
        )
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        other = next(place for place, count in enumerate(counts) if count != counts[0])
        raise ContractError(
            f"clip 0 has {_images(counts[0])}, but clip {other} has {_images(counts[other])}",
            where="images",
            accepted="the same number of images for every clip",
            hint="sample clips with different numbers of images in separate commands",
        )
    possible = choices(predictor)
    if counts[0] < len(_BY_COUNT) and _BY_COUNT[counts[0]] in possible:
        return
    takes = " or ".join(describe(names) for names in possible)
    if possible == ((),):
        raise ContractError(
            "the request contains an image, but this predictor makes clips from text alone",
            where="images",
            accepted="no image",
            hint="remove the images, or sample an image-to-video model",
        )
    raise ContractError(
        f"the request contains {_images(counts[0])}, but the predictor needs {takes}",
        where="images",
        accepted=" or ".join(_images(len(names)) for names in possible),
        hint="set --image (and --last-image for the last frame), or `image` in the rows of --prompts",
    )


def _images(count: int) -> str:
    return plural(count, "image") if count else "no image"
