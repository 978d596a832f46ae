"""Config of the built-in datasets and video readers: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import ComponentConfig, Kind, Range

_PYAV = ComponentConfig("video_reader", "core/pyav")
_Column = str | Annotated[int, Range(ge=0)]
_Share = Annotated[float, Range(ge=0, le=1)]


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
class TextRowsConfig:
    """Rows of text in a table. With `label` a text is classified or rated; without, it is learnt itself."""

    file: str  # JSON, JSONL, CSV, TSV or Parquet: the end of its name says which
    tokenizer: str  # folder of the tokenizer
    text: _Column = "text"  # column of the text: a name, or a number from 0 for rows that are lists
    prompt: _Column | None = None  # column of what stands before the text and is not learnt
    pair: _Column | None = None  # column of a second text beside the first, to classify both
    label: _Column | None = None  # column of the class or number; none: the text is learnt, token by token
    labels: tuple[str, ...] = ()  # names of the classes, in the order of their numbers; none: numbers from 0
    label_type: Literal["class", "number"] = "class"  # number: a regression
    separator: str = ""  # between prompt and text; not learnt
    max_length: Annotated[int, Range(ge=2)] = 512  # tokens of a row; longer ones are cut at their end
    pad_to_multiple: Annotated[int, Range(ge=1)] = 1  # lengths of batches, for kernels that like few of them
    part: tuple[_Share, _Share] = (0.0, 1.0)  # of the shuffled rows, from where to where
    split_seed: int = 0  # of that shuffling: the same in every part of a split
    quotes: bool = True  # CSV and TSV: fields may stand in double quotes; false: those are letters
    trust_remote_code: bool | Literal["known"] = False  # true: Python files of the folder are run

    def __post_init__(self) -> None:
        if self.part[0] >= self.part[1]:
            raise ValueError("part must rise: [0, 0.92], [0.92, 1]")
        if self.label is None:
            for name, given in (("labels", self.labels != ()), ("pair", self.pair is not None)):
                if given:
                    raise ValueError(
                        f"{name}: without `label`, the column of the classes, there is nothing to classify"
                    )
        elif self.prompt is not None:
            raise ValueError(
                "prompt: where rows have a label, all of their text is read; use pair for two texts"
            )
        if self.labels and self.label_type == "number":
            raise ValueError("labels: numbers have no names; leave them out, or label_type")
        if twice := sorted({name for name in self.labels if self.labels.count(name) > 1}):
            raise ValueError(f"labels: {twice[0]!r} is the name of several classes")


@dataclass(frozen=True)
class PyAVConfig:
    """Decoding by FFmpeg through PyAV."""

    max_pixels: Annotated[int, Range(ge=1)] = 4096 * 4096  # of a frame; larger ones are refused undecoded


@dataclass(frozen=True)
class DecordConfig(PyAVConfig):
    """Decoding by decord."""
