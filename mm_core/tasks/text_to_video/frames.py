"""Predictors that are given frames of their clip (`SupportsFrames`), as rows of a table of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mm_core.contracts import (
    ClipSize,
    FrameNames,
    GivenFrames,
    Input,
    Predictor,
    PredictorInputs,
    SupportsFrames,
    SupportsInputs,
)
from mm_core.errors import ContractError, plural

BY_COUNT: tuple[FrameNames, ...] = ((), ("first",), ("first", "last"))


def choices(predictor: Predictor) -> tuple[FrameNames, ...]:
    """The sets of given frames that a predictor accepts; the first is its default for training."""
    return predictor.frame_choices if isinstance(predictor, SupportsFrames) else ((),)


def describe(names: FrameNames) -> str:
    """Given frames in words, for a message: `no frame`, `the first frame`, `the first and the last frame`."""
    return f"the {' and the '.join(names)} frame" if names else "no frame"


def image_dim(predictor: Predictor) -> int | None:
    """Width of the image features that a text-to-video predictor takes; None if it takes none."""
    return predictor.image_dim if isinstance(predictor, SupportsFrames) else None


FRAMES, IMAGES = "frame latents", "image features"
"""Names of the rows of given frames in the table, and of their parts in the feature cache."""


def frame_rows(predictor: Predictor, names: FrameNames) -> tuple[Input, ...]:
    """The rows in the table of inputs of a predictor that is given frames of its clip."""
    if not names:
        return ()
    clip = Input(FRAMES, names, FramesOf(predictor, names).clip, "autoencoder")
    return (clip,) if image_dim(predictor) is None else (clip, Input(IMAGES, names, encoder="image_encoder"))


@dataclass(frozen=True)
class FramesOf:
    """A predictor with `frames_clip` and `with_frames`, as one with a table of inputs."""

    predictor: Any
    names: FrameNames
    inputs: tuple[Input, ...] = ()

    def clip(self, fields: Mapping[str, Tensor], size: ClipSize) -> Tensor:
        """The pixels that the autoencoder encodes for the given frames."""
        clip: Tensor = self.predictor.frames_clip([fields[name][:, :, 0] for name in self.names], size[0])
        return clip

    def with_inputs(self, latents: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> PredictorInputs:
        """As `SupportsInputs.with_inputs`."""
        frames = GivenFrames(self.names, given[FRAMES], given.get(IMAGES))
        found: PredictorInputs = self.predictor.with_frames(latents, timestep, frames)
        return found


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
    if counts[0] < len(BY_COUNT) and BY_COUNT[counts[0]] in possible:
        return
    takes = " or ".join(describe(names) for names in possible)
    if possible == ((),):
        table = predictor.inputs if isinstance(predictor, SupportsInputs) else ()
        own = [name for name in ("first", "last") if any(name in row.reads for row in table)]
        raise ContractError(
            "the request contains an image, but this predictor"
            + (" takes frames by its table of inputs" if own else " makes clips from text alone"),
            where="images",
            accepted="no image",
            hint=f"set {' '.join(f'--input {name}=FILE' for name in own)} in its place"
            if own
            else "remove the images, or sample an image-to-video model",
        )
    raise ContractError(
        f"the request contains {_images(counts[0])}, but the predictor needs {takes}",
        where="images",
        accepted=" or ".join(_images(len(names)) for names in possible),
        hint="set --image (and --last-image for the last frame), or `image` in the rows of --prompts",
    )


def _images(count: int) -> str:
    return plural(count, "image") if count else "no image"
