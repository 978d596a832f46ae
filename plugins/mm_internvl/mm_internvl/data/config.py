"""Config of the dataset `internvl/conversations`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.plugin import ComponentConfig, InputPath, Kind, Range
from mm_core.tasks import ConversationSource

_PYAV = ComponentConfig("video_reader", "core/pyav")


@dataclass(frozen=True)
class ConversationsConfig:
    """Conversations about images and videos, for InternVL in the Transformers layout."""

    sources: tuple[ConversationSource, ...]  # files of conversations; an epoch uses all of them
    processor: InputPath  # the model's folder: tokenizer, chat template and processor files
    max_length: Annotated[int, Range(ge=8)] = 16384  # largest number of tokens in a row, images included
    min_tiles: Annotated[int, Range(ge=1)] | None = (
        None  # fewest tiles per image; null: the processor's, or 1
    )
    max_tiles: Annotated[int, Range(ge=1)] | None = (
        None  # most tiles per image, without the thumbnail; null: the processor's, or 12
    )
    share_tiles: bool = False  # all images of a row share max_tiles, as in OpenGVLab's training
    frames: Annotated[int, Range(ge=1)] = (
        8  # frames per video, evenly spread, one tile each; short videos: fewer
    )
    system: str | None = None  # system prompt for conversations without one
    boxes: Literal["relative_1000"] | None = None  # numbers of boxes: 0 to 1000, as InternVL writes them
    packing: bool = False  # joins conversations into rows of up to max_length tokens
    lengths: str | None = None  # file that stores measured lengths for later runs; null: measure in each run
    max_pixels: Annotated[int, Range(ge=1)] = 8192 * 8192  # larger images are refused before they are decoded
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder for videos

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: list at least one file of conversations")
        if self.min_tiles is not None and self.max_tiles is not None and self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} is more than max_tiles {self.max_tiles}")
