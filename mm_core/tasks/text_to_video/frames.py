"""Frames that a clip is given: in training those of the clip itself, in sampling images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm_core.contracts import FrameNames, GivenFrames, Predictor, PredictorInputs, SupportsFrames
from mm_core.data.media.images import fit_image
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.returned_shapes import encoded

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo

_PLACES = {"first": 0, "last": -1}
_BY_COUNT: tuple[FrameNames, ...] = ((), ("first",), ("first", "last"))


def choices(predictor: Predictor) -> tuple[FrameNames, ...]:
    """The sets of frames that a predictor can be given; the first is what it is trained with."""
    return predictor.frame_choices if isinstance(predictor, SupportsFrames) else ((),)


def describe(names: FrameNames) -> str:
    """`no frame`, `the first frame`, `the first and the last frame`."""
    return f"the {' and the '.join(names)} frame" if names else "no frame"


def image_dim(predictor: Predictor) -> int | None:
    """Width of the image features that it takes; None for none."""
    return predictor.image_dim if isinstance(predictor, SupportsFrames) else None


def clip_frames(task: TextToVideo, pixels: Tensor, names: FrameNames) -> GivenFrames | None:
    """The frames of pixels[B,3,F,Y,X] in [-1,1] themselves, encoded. None where none are given."""
    if not names:
        return None
    frames = [pixels[:, :, _PLACES[name]] for name in names]
    originals = None
    if image_dim(task.predictor) is not None:
        originals = [list(((f + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)) for f in frames]
    return _encode(task, names, frames, originals, pixels.shape[2])


def image_frames(
    task: TextToVideo, images: Sequence[Sequence[Tensor]], size: tuple[int, int, int], device: torch.device
) -> GivenFrames | None:
    """The images of each clip, encoded. None where none are given.

    Args:
        images: of each clip the same number of images, uint8 [3,Y,X] of any size.
        size: (F, Y, X) of the clips.
    """
    names = _BY_COUNT[len(images[0])] if images else ()
    if not names:
        return None
    originals = [[clip[place] for clip in images] for place in range(len(names))]
    frames = [torch.stack([fit_image(i, *size[1:]) for i in column]).to(device) for column in originals]
    return _encode(task, names, frames, originals, size[0])


def _encode(
    task: TextToVideo,
    names: FrameNames,
    frames: Sequence[Tensor],
    originals: Sequence[Sequence[Tensor]] | None,
    num_frames: int,
) -> GivenFrames:
    predictor = task.predictor
    assert isinstance(predictor, SupportsFrames)
    latents = encoded(task.autoencoder, predictor.frames_clip(frames, num_frames))
    features = None
    if predictor.image_dim is not None:
        assert task.image_encoder is not None and originals is not None
        features = torch.cat([task.image_encoder.encode(column).float() for column in originals], dim=1)
    return GivenFrames(names, latents, features)


def inputs_of(
    predictor: Predictor, latents: Tensor, timestep: Tensor, given: GivenFrames | None
) -> PredictorInputs:
    """What the forward takes beside the text: latents[B,C,T,H,W], timestep[B] in model units."""
    if given is None:
        return PredictorInputs(latents, timestep)
    assert isinstance(predictor, SupportsFrames)
    return predictor.with_frames(latents, timestep, given)


def check_images(predictor: Predictor, images: Sequence[Sequence[Tensor]], prompts: int) -> None:
    """ContractError unless the images are as many as the predictor takes, the same for all clips."""
    rows = images or [()] * prompts
    if len(rows) != prompts:
        raise ContractError(
            f"there are {prompts} prompts and images for {len(rows)} clips",
            where="images",
            accepted="one row each",
        )
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        other = next(place for place, count in enumerate(counts) if count != counts[0])
        raise ContractError(
            f"clip 0 is given {_images(counts[0])} and clip {other} {_images(counts[other])}",
            where="images",
            accepted="as many for every clip",
            hint="sample them apart",
        )
    possible = choices(predictor)
    if counts[0] < len(_BY_COUNT) and _BY_COUNT[counts[0]] in possible:
        return
    takes = " or ".join(describe(names) for names in possible)
    if possible == ((),):
        raise ContractError(
            "an image is given, and this predictor makes clips from text alone",
            where="images",
            accepted="no image",
            hint="leave the images out, or sample an image-to-video model",
        )
    raise ContractError(
        f"{_images(counts[0])} {'are' if counts[0] > 1 else 'is'} given to a predictor that needs {takes}",
        where="images",
        accepted=" or ".join(_images(len(names)) for names in possible),
        hint="give --image (and --last-image for the last frame), or `image` in the rows of --prompts",
    )


def _images(count: int) -> str:
    return f"{count or 'no'} image{'s' * (count > 1)}"
