"""Transforms from decoded video frames to a model's pixels: resizing, cropping and flipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from mm_core.builtin.configs.data import Interpolation, ResizeCropConfig
from mm_core.contracts import (
    Randomness,
    SupportsFrameByFrame,
    SupportsLevels,
    SupportsStream,
    Transform,
    VideoInfo,
    VideoReader,
)
from mm_core.data.media.frames import read_frames
from mm_core.data.media.limits import decoding
from mm_core.errors import ContractError, DataError, plural
from mm_core.plugin.checks.places import place_of_object


class ResizeCrop:
    """The transform `resize_crop`: resizes frames, crops them, and flips some.

    Resizing is antialiased, on 8-bit values, like Pillow's (within two levels). Frames are resized singly.
    Without random numbers (validation, reading by `[index]`) a random crop is central and nothing is flipped.

    Args:
        others: the fields of `ResizeCropConfig`.
    """

    def __init__(self, **others: Any) -> None:
        self.wanted = ResizeCropConfig(**others)

    @property
    def levels(self) -> Tensor | None:
        """What each level of red, green and blue stands for, float32 [3,256]; None: -1 to 1."""
        if (self.wanted.mean, self.wanted.std) == (ResizeCropConfig.mean, ResizeCropConfig.std):
            return None
        mean, std = (torch.tensor(each)[:, None] for each in (self.wanted.mean, self.wanted.std))
        return (torch.arange(256) / 255 - mean) / std

    @property
    def fixed(self) -> bool:
        """Whether it makes no random choices."""
        return self.wanted.crop != "random" and self.wanted.flip == 0

    def pixels(self, frames: Tensor, height: int, width: int, rng: Randomness | None) -> Tensor:
        """The pixels of a sample, uint8 [3,F,height,width].

        Args:
            frames: uint8 [F,Y,X,3].
            height: of the result.
            width: of the result.
            rng: of the sample; None: no random choices.

        Raises:
            DataError: with `resize: exact`, the frames are smaller than the result.
        """
        one = self.frame_by_frame((frames.shape[1], frames.shape[2]), height, width, rng)
        return torch.stack([one(frame) for frame in frames], dim=1)

    def frame_by_frame(
        self, source: tuple[int, int], height: int, width: int, rng: Randomness | None
    ) -> Callable[[Tensor], Tensor]:
        """What `pixels` does with frames of the size `source`, as a function of one frame."""
        size = self._resized(*source, height, width)
        spare = size[0] - height, size[1] - width
        if min(spare) < 0:
            raise DataError(
                f"the frames of {source[0]} x {source[1]} are smaller than {height} x {width}",
                hint="set `resize: short_side` of the transform, which enlarges them",
            )
        top, left = self._corner(spare, rng)
        flipped = rng is not None and self.wanted.flip > 0 and rng.uniform("flip") < self.wanted.flip

        def one(frame: Tensor) -> Tensor:
            channels = frame.permute(2, 0, 1)
            if size != source:
                channels = _resize(channels, size, self.wanted.interpolation)
            cropped = channels[:, top : top + height, left : left + width]
            return cropped.flip(-1) if flipped else cropped

        return one

    def _resized(self, source_height: int, source_width: int, height: int, width: int) -> tuple[int, int]:
        if self.wanted.resize == "stretch":
            return height, width
        if self.wanted.resize == "exact":
            return source_height, source_width
        return covering_size(source_height, source_width, height, width)

    def _corner(self, spare: tuple[int, int], rng: Randomness | None) -> tuple[int, int]:
        """The first row and column of the crop, of as many as there are to spare."""
        rows, columns = spare
        if self.wanted.crop == "random" and rng is not None:
            down, across = rng.uniform("crop", 0), rng.uniform("crop", 1)
            return int(down * (rows + 1)), int(across * (columns + 1))
        down, across = (0.5, 0.5) if isinstance(self.wanted.crop, str) else self.wanted.crop
        return int(down * rows), int(across * columns)


def transform_of(transform: Transform | None, interpolation: Interpolation) -> Transform:
    """The transform of a dataset: the given one, or the short side resized and the centre cropped."""
    return ResizeCrop(interpolation=interpolation) if transform is None else transform


def draws_of(transform: Transform, rng: Randomness | None) -> tuple[int, ...]:
    """What decides the random choices of a transform for a sample; () if it makes none, for all we know."""
    fixed = isinstance(transform, ResizeCrop) and transform.fixed
    return () if rng is None or fixed else (rng.seed32("transform"),)


def levels_of(transform: Transform) -> Tensor | None:
    """The levels of a transform for `VideoTextBatch`; None: -1 to 1. ContractError if they are no table."""
    found: object = transform.levels if isinstance(transform, SupportsLevels) else None
    if found is None or _is(found, torch.float32, (3, 256)):
        return found
    raise _returned(found, "levels", transform, "torch.float32 [3, 256]")


def read_pixels(
    reader: VideoReader,
    transform: Transform,
    path: Path,
    choose: Callable[[VideoInfo], Sequence[float]],
    size: tuple[int, int],
    rng: Randomness | None,
) -> tuple[Tensor, VideoInfo]:
    """The pixels of a clip, uint8 [3,F,height,width], and what `probe` returns for its file.

    Frames are transformed as they are decoded where reader and transform can.

    Args:
        reader: of the dataset.
        transform: of the dataset.
        path: the video.
        choose: the F times of a video, in seconds.
        size: height and width of the pixels.
        rng: of the sample; None: no random choices.

    Raises:
        ContractError: reader or transform return something else.
        DataError: the video cannot be read, or its frames cannot be used.
    """
    if (
        not isinstance(reader, SupportsStream)
        or not isinstance(transform, SupportsFrameByFrame)
        or not _newest(reader, "stream", "read", "probe")
        or not _newest(transform, "frame_by_frame", "pixels")
    ):
        with decoding(str(path)):
            info = reader.probe(path)
            frames = read_frames(reader, path, choose(info))
        return transformed(transform, frames, size, rng, str(path)), info
    known: list[tuple[VideoInfo, int]] = []

    def counted(info: VideoInfo) -> Sequence[float]:
        times = choose(info)
        known.append((info, len(times)))
        return times

    pixels: Tensor | None = None
    missing: set[int] = set()
    with _named(str(path)), decoding(str(path)):
        for place, frame in reader.stream(path, counted):
            if not _is(frame, torch.uint8, (*frame.shape[:2], 3)):
                raise _returned(frame, "stream", reader, "torch.uint8 [Y, X, 3] for each frame")
            if pixels is None:
                pixels = torch.empty(3, known[0][1], *size, dtype=torch.uint8)
                missing = set(range(known[0][1]))
                one = transform.frame_by_frame((frame.shape[0], frame.shape[1]), *size, rng)
            changed = one(frame)
            if not _is(changed, torch.uint8, (3, *size)):
                what = "the function of frame_by_frame"
                raise _returned(changed, what, transform, f"torch.uint8 {[3, *size]}")
            pixels[:, place] = changed
            missing.discard(place)
    if pixels is None or missing:
        raise _returned(sorted(missing), "stream", reader, "a frame for each time")
    return pixels, known[0][0]


def transformed(
    transform: Transform, frames: Tensor, size: tuple[int, int], rng: Randomness | None, name: str
) -> Tensor:
    """The pixels uint8 [3,F,height,width] that a transform makes of frames uint8 [F,Y,X,3].

    Args:
        transform: of the dataset.
        frames: the decoded frames.
        size: height and width of the pixels.
        rng: of the sample; None: no random choices.
        name: of the sample, for errors.

    Raises:
        ContractError: it returns something else.
        DataError: these frames cannot be used.
    """
    with _named(name):
        pixels: object = transform.pixels(frames, *size, rng)
    shape = (3, len(frames), *size)
    if _is(pixels, torch.uint8, shape):
        return pixels
    raise _returned(pixels, "pixels", transform, f"torch.uint8 {[*shape]}")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors about the data get the name of the sample, if they have none."""
    try:
        yield
    except DataError as error:
        error.where = error.where or name
        raise


def _newest(found: object, best: str, *others: str) -> bool:
    """Whether no subclass of the class that defines a method defines one of the others anew."""
    order = type(found).__mro__
    definers = [next((cls for cls in order if name in vars(cls)), None) for name in (best, *others)]
    first = definers[0]
    return first is not None and all(each is not None and issubclass(first, each) for each in definers)


def _is(found: object, dtype: torch.dtype, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and found.dtype == dtype and found.shape == shape


def _returned(found: object, member: str, author: object, accepted: str) -> ContractError:
    shown = f"{found.dtype} {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__
    if isinstance(found, list):
        shown = f"no frame for {plural(len(found), 'time')}" if found else "no frame"
    return ContractError(f"{member} returned {shown}", where=place_of_object(author), accepted=accepted)


def covering_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """The smallest (height, width) with a video frame's aspect ratio that covers a target size."""
    scale = max(target_height / height, target_width / width)
    return max(target_height, round(height * scale)), max(target_width, round(width * scale))


def _resize(frame: Tensor, size: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """A frame uint8 [3,Y,X] in another size. `area` takes the mean of the pixels that a new one covers."""
    if interpolation == "area":
        return F.interpolate(frame[None].float(), size=size, mode="area")[0].round().byte()
    return F.interpolate(frame[None], size=size, mode=interpolation, antialias=True)[0]


def clip_pixels(clip: Any, layout: str, values: tuple[float, float]) -> Tensor:
    """The pixels of a clip of another code's, float32 [3,F,Y,X] in [-1, 1].

    Args:
        clip: a tensor or array.
        layout: the order of its axes: `f c y x`, `c f y x` or `f y x c`.
        values: those of black and of white.

    Raises:
        ContractError: the clip has another layout, or values outside these.
    """
    found, axes = torch.as_tensor(clip), layout.split()
    if found.ndim != len(axes) or found.shape[axes.index("c")] != 3:
        raise ContractError(
            f"a clip is {list(found.shape)}: in the layout {layout!r}, no 3 colours along c",
            accepted="the letters of its axes in their order: f frames, c colours, y rows, x columns",
            hint="correct the layout where the dataset calls clip_pixels",
        )
    low, high = values
    pixels = found.permute([axes.index(axis) for axis in "cfyx"]).float()
    least, most = (float(value) for value in pixels.aminmax())
    if not low - 0.01 * (high - low) <= least <= most <= high + 0.01 * (high - low):
        raise ContractError(
            f"a clip has values from {least:.4g} to {most:.4g}, where black is {low:g} and white {high:g}",
            accepted="(0.0, 255.0) for bytes, (0.0, 1.0) or (-1.0, 1.0)",
            hint="correct the range where the dataset calls clip_pixels",
        )
    return (pixels - low) * (2 / (high - low)) - 1
