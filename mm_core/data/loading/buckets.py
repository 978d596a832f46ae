"""Buckets of frames x aspect x resolution: derived from limits, and the nearest one of each row."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CROP = 1.07  # two neighbouring aspects; what lies between loses at most its root, and rounding
_WIDEST = 4.0
_SIDE = (1 << 21) - 1  # pixels
_LEVELS = (1.0, 0.5, 0.25)
"""Shares of the largest area: smaller images and clips have buckets that do not enlarge them."""


@dataclass(frozen=True)
class Bucket:
    """Samples of one size, which share micro-batches.

    Attributes:
        num_frames: 1 for images.
        height: in pixels.
        width: in pixels.
        micro_batch_size: samples of a rank's forward.
    """

    num_frames: int
    height: int
    width: int
    micro_batch_size: int = 1

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return self.num_frames, self.height, self.width


@dataclass(frozen=True)
class Grid:
    """Sizes of clips that a model takes.

    Attributes:
        frames: its numbers of frames up to the longest, in order: each has one more token in time.
        period: in pixels; heights and widths are multiples of it.
    """

    frames: tuple[int, ...]
    period: int

    def tokens(self, size: tuple[int, int, int]) -> int:
        """A measure of the work for a clip of (frames, height, width)."""
        return bisect_right(self.frames, size[0]) * (size[1] // self.period) * (size[2] // self.period)


def derived(grid: Grid, max_height: int, max_width: int) -> list[tuple[int, int, int]]:
    """The sizes (frames, height, width) that `buckets: auto` chooses from, the largest first.

    Numbers of frames are halved from the longest to one. Areas are that of the limits, its half and its
    quarter. Aspects are 1.07 apart or less: cropping to the nearest one loses at most 3.5 %, and rounding.

    Args:
        grid: what the model takes.
        max_height: with `max_width`, the largest area in pixels; one of the two sides may be exceeded.
        max_width: see `max_height`.
    """
    frames = {grid.frames[-1]}
    place = len(grid.frames) - 1
    while place:
        place //= 2
        frames.add(grid.frames[place])
    planes = dict.fromkeys(
        plane
        for level in _LEVELS
        for aspect in _aspects(max_height / max_width)
        if (plane := _plane(max_height * max_width * level, aspect, grid.period)) is not None
    )
    found = [(count, *plane) for count in frames for plane in planes]
    return sorted(found, key=lambda size: (-grid.tokens(size), -size[0], size))


def _aspects(own: float) -> Iterator[float]:
    """Aspects (height to width) that contain 1, the limits' own and its inverse."""
    steps = math.ceil(abs(math.log(own)) / math.log(_CROP) - 1e-9)
    step = abs(math.log(own)) / steps if steps else math.log(_CROP)
    most = max(int(math.log(_WIDEST) / step + 1e-9), steps)
    return (math.exp(step * place) for place in range(-most, most + 1))


def _plane(area: float, aspect: float, period: int) -> tuple[int, int] | None:
    """The (height, width) in multiples of `period` within an area whose aspect is the nearest."""
    height, width = math.sqrt(area * aspect), math.sqrt(area / aspect)
    near = [
        (down * period, across * period)
        for down in {int(height / period + 1e-6), math.ceil(height / period - 1e-6)}
        for across in {int(width / period + 1e-6), math.ceil(width / period - 1e-6)}
        if down and across and down * across * period**2 <= area * (1 + 1e-9)
    ]
    return min(near, key=lambda plane: (_between(plane, aspect), -plane[0] * plane[1]), default=None)


def _between(plane: tuple[int, int], aspect: float) -> float:
    return round(abs(math.log(plane[0] / plane[1] / aspect)), 6)


def nearest(rows: Tensor, sizes: Sequence[tuple[int, int, int]], upscale: bool) -> Tensor:
    """The number of the size that each row is cropped to, int64 [R]; -1 where none fits.

    A clip takes the largest number of frames that it has. Of the planes that do not enlarge it, it takes the
    largest one whose aspect is the nearest in log space, or less than 3.5 % worse.

    Args:
        rows: int64 [R,3], frames, height and width of each row; 0: unknown, which fits nothing.
        sizes: (frames, height, width) of each bucket.
        upscale: whether a plane may be larger than the image or clip.
    """
    counts = np.array(sorted({size[0] for size in sizes}), dtype=np.int64)
    given = rows.numpy()
    taken = np.searchsorted(counts, given[:, 0], side="right") - 1
    known = (given > 0).all(1) & (taken >= 0)
    # A million rows have few different sizes: one number for each is fast to sort.
    packed = (taken << 42 | np.minimum(given[:, 1], _SIDE) << 21 | np.minimum(given[:, 2], _SIDE))[known]
    keys, back = np.unique(packed, return_inverse=True)
    different = np.column_stack([keys >> 42, keys >> 21 & _SIDE, keys & _SIDE])
    chosen = np.array(
        [_choose(row, counts.tolist(), sizes, upscale) for row in different.tolist()], dtype=np.int64
    )
    found = np.full(len(given), -1, dtype=np.int64)
    found[known] = chosen[back.reshape(-1)] if len(chosen) else -1
    return torch.from_numpy(found)


def _choose(
    row: Sequence[int], counts: Sequence[int], sizes: Sequence[tuple[int, int, int]], upscale: bool
) -> int:
    place, height, width = row
    for count in reversed(counts[: place + 1]):
        fits = [
            (_between((size[1], size[2]), height / width), -size[1] * size[2], number)
            for number, size in enumerate(sizes)
            if size[0] == count and (upscale or (size[1] <= height and size[2] <= width))
        ]
        if fits:
            least = min(fits)[0]
            near = [each for each in fits if each[0] <= least + math.log(_CROP) / 2]
            return min(near, key=lambda each: (each[1], each[0]))[2]
    return -1
