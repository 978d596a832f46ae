"""Config of the built-in datasets and video readers: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.plugin.fields import ComponentConfig, Kind, Range

_PYAV = ComponentConfig("video_reader", "core/pyav")


@dataclass(frozen=True)
class VideoTextConfig:
    """Captioned clips listed in a JSON or JSONL file."""

    annotations: str  # JSON list or JSONL file of rows {path, cap, ...}
    num_frames: Annotated[int, Range(ge=1)]  # frames of a training clip
    height: Annotated[int, Range(ge=1)]  # pixels, after resizing and cropping
    width: Annotated[int, Range(ge=1)]  # pixels, after resizing and cropping
    folder: str | None = None  # the rows' paths start here; none: the folder of the annotation file
    fps: Annotated[float, Range(gt=0)] | None = None  # frames sampled a second; none: each clip's own rate
    random_start: bool = False  # where a clip starts in a longer video; false: at its beginning
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"  # of the resize, always antialiased
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder of the videos


@dataclass(frozen=True)
class PyAVConfig:
    """Decoding by FFmpeg through PyAV."""

    max_pixels: Annotated[int, Range(ge=1)] = 4096 * 4096  # of a frame; larger ones are refused undecoded


@dataclass(frozen=True)
class DecordConfig:
    """Decoding by decord."""

    max_pixels: Annotated[int, Range(ge=1)] = 4096 * 4096  # of a frame; larger ones are refused undecoded
