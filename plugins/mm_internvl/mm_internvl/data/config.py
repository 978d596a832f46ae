"""Config of the dataset `internvl/conversations`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_core.plugin import ComponentConfig, Kind, Range

_PYAV = ComponentConfig("video_reader", "core/pyav")


@dataclass(frozen=True)
class Source:
    """One file of conversations, and how often an epoch sees it."""

    annotations: str  # JSON list or JSONL file of rows with `conversations` or `messages`
    folder: str | None = None  # paths of images and videos start here; none: the annotation file's folder
    weight: Annotated[float, Range(gt=0, le=1000)] = 1.0  # times an epoch: 2 is each row twice, 0.5 one half


@dataclass(frozen=True)
class ConversationsConfig:
    """Conversations about images and videos, for InternVL in the Transformers layout."""

    sources: tuple[Source, ...]  # files of conversations; an epoch is all of them
    processor: str  # the model's folder: tokenizer, chat template and processor files
    max_length: Annotated[int, Range(ge=8)] = 16384  # tokens of a row, those of its images included
    min_tiles: Annotated[int, Range(ge=1)] | None = None  # an image is cut into; none: the processor's, or 1
    max_tiles: Annotated[int, Range(ge=1)] | None = None  # the thumbnail not counted; none: its own, or 12
    share_tiles: bool = False  # each image of a row has at most max_tiles // images, as OpenGVLab trains
    frames: Annotated[int, Range(ge=1)] = 8  # of a video, evenly spread, one tile each; short ones have fewer
    system: str | None = None  # prompt of conversations that begin without one
    packing: bool = False  # joins conversations into rows of up to max_length tokens
    lengths: str | None = None  # file that keeps the measured lengths between runs; none: measured each time
    max_pixels: Annotated[int, Range(ge=1)] = 8192 * 8192  # of an image; larger ones are refused undecoded
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder of the videos

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty")
        if self.min_tiles is not None and self.max_tiles is not None and self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} is more than max_tiles {self.max_tiles}")
