"""Frames of a video from any reader, checked: the fault of a plugin's reader is named at the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import VideoInfo, VideoReader
from mm_core.data.media.limits import decoding
from mm_core.errors import ContractError, DataError, plural
from mm_core.plugin.checks.places import place_of_object

_DECODED = 8  # frames of a whole video that are in memory at a time


def read_frames(reader: VideoReader, path: Path, seconds: Sequence[float]) -> Tensor:
    """The frames of a video at the given times, uint8 [F,Y,X,3]. ContractError if a reader returns others."""
    with decoding(str(path)):
        frames = reader.read(path, seconds)
    shape = (len(seconds), *frames.shape[1:3], 3) if isinstance(frames, Tensor) else None
    if shape is None or frames.dtype != torch.uint8 or frames.shape != shape:
        shown = f"{frames.dtype} {[*frames.shape]}" if isinstance(frames, Tensor) else type(frames).__name__
        raise ContractError(
            f"read returned {shown} for {plural(len(seconds), 'time')}",
            where=f"the video reader, {place_of_object(reader)}",
            accepted=f"torch.uint8 [{len(seconds)}, Y, X, 3]",
        )
    return frames


def read_all(reader: VideoReader, path: Path, info: VideoInfo) -> Tensor:
    """Decodes a video with these properties to its last frame, and returns the first, uint8 [1,Y,X,3]."""
    times = [(frame + 0.5) / info.fps for frame in range(info.num_frames)]
    shown = read_frames(reader, path, times[:_DECODED])[:1]
    for first in range(_DECODED, len(times), _DECODED):
        read_frames(reader, path, times[first : first + _DECODED])
    return shown


def clip_times(
    info: VideoInfo,
    path: Path,
    num_frames: int,
    fps: float | None,
    start: float,
    setting: str = "num_frames of the dataset",
) -> list[float]:
    """Seconds of a clip's frames, the middle of source frames; `start` is 0 (first) to 1 (last possible), and
    `setting` what a user lowers for shorter videos."""
    period = 1.0 / info.fps
    spacing = period if fps is None else 1.0 / fps
    spare = info.num_frames * period - period - (num_frames - 1) * spacing
    if spare < -1e-6:
        available = math.floor((info.num_frames - 1) * period / spacing + 1e-6) + 1
        raise too_short(path, available, "it has", num_frames, fps, setting)
    first = int(start * (math.floor(spare / period + 1e-6) + 1))
    return [(first + 0.5) * period + frame * spacing for frame in range(num_frames)]


def too_short(
    path: Path,
    available: int,
    verb: str,
    num_frames: int,
    fps: float | None,
    setting: str = "num_frames of the dataset",
) -> DataError:
    """The error for a video with fewer frames than a clip needs."""
    rate = "" if fps is None else f" at {fps:g} per second"
    return DataError(
        f"the video is too short: {verb} {plural(available, 'frame')}{rate}, but a clip needs {num_frames}",
        where=str(path),
        hint=f"use a longer video, or lower {setting}",
    )
