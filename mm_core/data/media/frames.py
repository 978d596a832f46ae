"""Frames of a video from any reader, checked: the fault of a plugin's reader is named at the reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import VideoReader
from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.places import place_of_object


def read_frames(reader: VideoReader, path: Path, seconds: Sequence[float]) -> Tensor:
    """The frames of a video at the given times, uint8 [F,Y,X,3]. ContractError if a reader returns others."""
    frames = reader.read(path, seconds)
    shape = (len(seconds), *frames.shape[1:3], 3) if isinstance(frames, Tensor) else None
    if shape is None or frames.dtype != torch.uint8 or frames.shape != shape:
        raise _wrong_frames(reader, frames, len(seconds))
    return frames


def _wrong_frames(reader: VideoReader, found: object, count: int) -> ContractError:
    shown = f"{found.dtype} {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__
    return ContractError(
        f"read returned {shown} for {plural(count, 'time')}",
        where=f"the video reader, {place_of_object(reader)}",
        accepted=f"torch.uint8 [{count}, Y, X, 3]",
    )
