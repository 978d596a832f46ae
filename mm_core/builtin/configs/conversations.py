"""Config of the dataset `conversations`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import ComponentConfig, FromTask, InputPath, Kind, Range

_PYAV = ComponentConfig("video_reader", "core/pyav")


@dataclass(frozen=True)
class ConversationSource:
    """One file of conversations, and how often an epoch uses it."""

    annotations: InputPath  # JSON list, JSONL or Parquet of rows with `conversations` or `messages`
    folder: InputPath | None = (
        None  # folder for relative paths of images and videos; null: the annotation file's
    )
    weight: Annotated[float, Range(gt=0, le=1000)] = (
        1.0  # uses per epoch: 2 is each row twice, 0.5 half of them
    )


@dataclass(frozen=True)
class ConversationsConfig:
    """Config of the dataset `conversations`: chats about images, for any model with a chat template."""

    sources: tuple[ConversationSource, ...]  # files of conversations; an epoch uses all of them
    processor: Annotated[InputPath, FromTask("from_pretrained")] | None = (
        None  # the folder of the model's processor, tokenizer and chat template; null: the task's model
    )
    max_length: Annotated[int, Range(ge=8)] = 16384  # largest number of tokens in a row, images included
    system: str | None = None  # system prompt for conversations without one
    reasoning: Literal["keep", "drop"] = "keep"  # drop: thoughts of the assistant are left out
    boxes: Literal["pixels", "relative_1000"] | None = (
        None  # numbers of boxes as the model writes them: of the image that it sees, or 0 to 1000
    )
    packing: bool = False  # joins conversations into rows of up to max_length tokens
    lengths: str | None = None  # file that stores measured lengths for later runs; null: measure in each run
    frames: Annotated[int, Range(ge=1)] = 8  # most frames of a video, evenly spread, each shown as an image
    max_pixels: Annotated[int, Range(ge=1)] = 8192 * 8192  # larger images are refused before they are decoded
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder for videos
    trust_remote_code: bool | Literal["known"] = False  # true: Python files in the folder are run

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: list at least one file of conversations")
