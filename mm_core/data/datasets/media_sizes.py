"""The sizes of the rows of `media_text`: as declared, or by the header of the file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts import VideoInfo
from mm_core.data.rows.mapped_rows import MappedRows, read_once
from mm_core.data.rows.media_rows import MediaRow
from mm_core.errors import ContractError, DataError, RunWarning, plural

_Size = tuple[float, float, float, float]
_THREADS = 16
_EVERY = 10.0
"""Seconds between two messages about headers that are read."""

IMAGE_FPS = 25.0
"""Frames per second of an image, as in the video readers."""


def sizes_of(rows: MappedRows, rate: float | None, header: Callable[[MediaRow], VideoInfo]) -> Tensor:
    """Frames at a rate, height and width of each row, int64 [R,3]; 0: its file cannot be read.

    What a row declares is not checked. Where it declares too little, one rank of a host reads the header.

    Args:
        rows: of the dataset.
        rate: frames per second of its samples; None: that of each clip.
        header: reads the properties of a row's file.
    """
    facts = rows.facts
    frames = np.where(facts["image"], 1, facts["num_frames"])
    found = np.column_stack([frames, facts["height"], facts["width"]]).astype(np.int64)
    rates = facts["fps"].copy()
    lacks = (found == 0).any(1) | ((rates == 0) & ~facts["image"] if rate is not None else False)
    unknown = lacks.nonzero()[0]
    if len(unknown):
        folder, _ = read_once(partial(_probe, unknown.tolist(), partial(_size, rows, header)))
        read = np.load(folder / "sizes.npy")
        found[unknown], rates[unknown] = read[:, :3].astype(np.int64), read[:, 3]
    if rate is not None:
        clips = (found[:, 0] > 0) & (rates > 0)  # those under the suffix of an image too
        spacing = rates[clips] / rate
        found[clips, 0] = np.floor((found[clips, 0] - 1) / spacing + 1e-6) + 1
    return torch.from_numpy(found)


def _probe(numbers: Sequence[int], size_of: Callable[[int], _Size], folder: Path) -> None:
    """Writes frames, height, width and frames per second of some rows, by their headers; 0: unreadable."""
    found = np.zeros((len(numbers), 4))
    began = shown = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for place, size in enumerate(pool.map(size_of, numbers)):
            found[place] = size
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                what = f"{place + 1} of {plural(len(numbers), 'header')} read in {shown - began:.0f} s"
                warnings.warn(f"{what}; declare num_frames, height and width of the rows", RunWarning, 2)
    np.save(folder / "sizes.npy", found)


def _size(rows: MappedRows, header: Callable[[MediaRow], VideoInfo], number: int) -> _Size:
    try:
        info = header(rows[number])
    except DataError:
        return 0.0, 0.0, 0.0, 0.0  # training lists it, with the reason
    return info.num_frames, info.height, info.width, info.fps


def named_size(frames: int, height: int, width: int, still: bool) -> str:
    """A file's size in words: `480 x 832, 49 frames`; of a still, without its frame."""
    return f"{height} x {width}" + f", {plural(frames, 'frame')}" * (not still)


def mixed_media(size: int, what: str, where: str) -> ContractError:
    """The error for micro-batches of images and clips."""
    return ContractError(
        f"{what} would join images, which have one frame, and clips in micro-batches of {size}",
        where=where,
        accepted="one kind of medium, num_frames: 1, or train.micro_batch_size: 1",
        hint="data.loader.mode: variable reads each kind and size in micro-batches of its own",
    )


def of_image(height: int, width: int) -> VideoInfo:
    """The properties of an image as a clip of one frame."""
    return VideoInfo(width, height, IMAGE_FPS, 1, 1 / IMAGE_FPS)
