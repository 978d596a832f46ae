"""Configs of the built-in datasets and video readers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import ComponentConfig, InputPath, Kind, Range

_PYAV = ComponentConfig("video_reader", "core/pyav")
_Column = str | Annotated[int, Range(ge=0)]
_Pixels = Annotated[int, Range(ge=1)]
_Share = Annotated[float, Range(ge=0, le=1)]
Interpolation = Literal["bicubic", "bilinear", "area"]


@dataclass(frozen=True)
class ResizeCropConfig:
    """Config of the transform `resize_crop`: how frames get the size of a sample."""

    resize: Literal["short_side", "stretch", "exact"] = (
        "short_side"  # until both sides cover the sample; stretch: without aspect ratio; exact: crop only
    )
    crop: Literal["centre", "random"] | tuple[_Share, _Share] = (
        "centre"  # or [down, across], [0, 0.5] is the top, in the middle; validation: centre for random
    )
    flip: _Share = 0.0  # share of the training samples that are mirrored left to right
    interpolation: Interpolation = "bicubic"  # of the resize; all are antialiased
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of red, green, blue in [0, 1], subtracted
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)  # the rest is divided by it: -1 to 1

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise ValueError("std is the divisor of the pixels; set three numbers above 0")


def _one_of(interpolation: Interpolation, transform: ComponentConfig | None) -> None:
    if transform is not None and interpolation != "bicubic":
        raise ValueError("interpolation is not used where transform is set; set it in the transform")


@dataclass(frozen=True)
class VideoTextConfig:
    """Config of the dataset `video_text`: captioned clips listed in a JSON or JSONL file."""

    annotations: InputPath  # JSON list or JSONL file of rows {path, cap, ...}
    num_frames: Annotated[int, Range(ge=1)]  # frames per training clip
    height: Annotated[int, Range(ge=1)]  # pixels, after resizing and cropping
    width: Annotated[int, Range(ge=1)]  # pixels, after resizing and cropping
    folder: InputPath | None = None  # base folder of the rows' paths; null: the folder of the annotation file
    fps: Annotated[float, Range(gt=0)] | None = None  # frames sampled per second; null: each clip's own rate
    random_start: bool = False  # start clips at a random frame of a longer video; false: at its beginning
    interpolation: Interpolation = "bicubic"  # of the resize, where no transform is set (antialiased)
    transform: Annotated[ComponentConfig, Kind("transform")] | None = (
        None  # resizes, crops, flips; null: the short side is resized, and the centre cropped
    )
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder of the videos

    def __post_init__(self) -> None:
        _one_of(self.interpolation, self.transform)


_TAKEN = ("video", "first", "last", "caption", "fps", "pixels", "id", "key", "weight")


@dataclass(frozen=True)
class MediaField:
    """A further column of a source: its values become a field of the samples, for inputs of predictors."""

    name: str  # of the field, as an input of the predictor reads it
    column: _Column | None = None  # its column, or the number of that from 0; null: the one of the same name
    kind: Literal["clip", "number", "images"] = (
        "clip"  # a path, read at the times, crop and flip of the row's own; a number; or paths of pictures
    )
    most: Annotated[int, Range(ge=1)] = 1  # kind images: pictures of a row, each of its own size

    @property
    def place(self) -> str | int:
        """The column of the field."""
        return self.name if self.column is None else self.column

    @property
    def pictures(self) -> int:
        """Most pictures of a row; 0: the field is one value."""
        return self.most if self.kind == "images" else 0


@dataclass(frozen=True)
class MediaColumns:
    """Names of a source's columns, or their numbers from 0. Sizes are hints: the file itself decides."""

    path: _Column = "path"  # the picture or clip, relative to the source's folder
    caption: _Column | tuple[_Column, ...] = "cap"  # a text or a list of texts; several columns: one is drawn
    num_frames: _Column = "num_frames"  # frames of a clip
    fps: _Column = "fps"  # frames per second
    resolution: _Column = "resolution"  # {height, width}, [height, width] or "480x832"
    height: _Column = "height"  # pixels
    width: _Column = "width"  # pixels
    fields: tuple[MediaField, ...] = ()  # further fields of the samples, such as a control clip

    def __post_init__(self) -> None:
        taken = [*_TAKEN]
        for each in self.fields:
            if each.name in taken:
                raise ValueError(f"fields: {each.name} is taken; taken are {', '.join(taken)}")
            taken.append(each.name)


@dataclass(frozen=True)
class CaptionTags:
    """How captions that are lists of tags change each time a row is read."""

    separator: str = ","  # between two tags
    keep: Annotated[int, Range(ge=0)] = 0  # first tags that stay in their places
    shuffle: bool = False  # whether the other tags are shuffled
    drop: _Share = 0.0  # share of the other tags that is left out

    def __post_init__(self) -> None:
        if not self.separator.strip():
            raise ValueError("separator is empty or white space, which words inside a tag contain too")


@dataclass(frozen=True)
class MediaSource:
    """One table, folder or archive of pictures and clips, and how often an epoch uses it."""

    annotations: (
        InputPath  # a table of rows, a folder of media with .txt captions beside them, or WebDataset tars
    )
    folder: InputPath | None = None  # base folder of a table's paths; null: the folder of the table
    weight: Annotated[float, Range(gt=0, le=1000)] = (
        1.0  # uses per epoch: 2 is each row twice, 0.5 half of them
    )
    where: str | None = None  # condition on the columns, e.g. width >= 480; other rows are left out
    columns: MediaColumns = MediaColumns()  # names of the columns
    caption: str | None = None  # of files and rows that have none; null: such files are left out
    caption_prefix: str = ""  # text before each caption
    tags: CaptionTags | None = None  # captions are lists of tags; null: they are kept as they are


@dataclass(frozen=True)
class MediaTextConfig:
    """Config of the dataset `media_text`: captioned pictures and clips from several sources."""

    sources: tuple[MediaSource, ...]  # tables, folders and archives; an epoch uses all of them
    num_frames: Annotated[int, Range(ge=1)] = (
        81  # frames per training clip, in buckets the longest; pictures: 1
    )
    height: _Pixels | None = None  # pixels, after resizing and cropping; null: in buckets
    width: _Pixels | None = None  # pixels, after resizing and cropping; null: in buckets
    max_height: _Pixels | None = None  # with max_width: the largest area of the loader's buckets
    max_width: _Pixels | None = None  # pixels
    fps: Annotated[float, Range(gt=0)] | None = None  # frames sampled per second; null: each clip's own rate
    random_start: bool = False  # start clips at a random frame of a longer video; false: at its beginning
    interpolation: Interpolation = "bicubic"  # of the resize, where no transform is set (antialiased)
    transform: Annotated[ComponentConfig, Kind("transform")] | None = (
        None  # resizes, crops, flips; null: the short side is resized, and the centre cropped
    )
    max_pixels: Annotated[int, Range(ge=1)] = 8192 * 8192  # larger pictures are refused before decoding
    reader: Annotated[ComponentConfig, Kind("video_reader")] = _PYAV  # decoder of the clips

    def __post_init__(self) -> None:
        _one_of(self.interpolation, self.transform)
        if not self.sources:
            raise ValueError("sources is empty: list at least one table, folder or archive")
        first, *others = ([(f.name, f.kind, f.most) for f in each.columns.fields] for each in self.sources)
        if any(fields != first for fields in others):
            raise ValueError(
                "columns.fields differ between sources; give each of them the same names, kinds and `most`"
            )
        for one, other in (("height", "width"), ("max_height", "max_width")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} belong together; set both, or none of them")
        if self.height is not None and self.max_height is not None:
            raise ValueError(
                "height and max_height are both set; set height and width for one size, or max_height and"
                " max_width for buckets"
            )


@dataclass(frozen=True)
class ShapesConfig:
    """Config of the dataset `shapes`: captioned clips of moving shapes, drawn without files."""

    num_frames: Annotated[int, Range(ge=1)]  # frames per clip
    height: Annotated[int, Range(ge=8)]  # pixels
    width: Annotated[int, Range(ge=8)]  # pixels
    clips: Annotated[int, Range(ge=1)] = 512  # number of different clips
    fps: Annotated[float, Range(gt=0)] = 8.0  # frames per second
    seed: int = 0  # of sizes, places and speeds


@dataclass(frozen=True)
class TextRowsConfig:
    """Config of the dataset `text_rows`: rows of text in a table.

    With `label`, texts are classified or rated; without it, the text itself is learnt token by token.
    """

    file: InputPath  # JSON, JSONL, CSV, TSV or Parquet file, recognised by its suffix
    tokenizer: InputPath  # folder of the tokenizer
    text: _Column = "text"  # column of the text: a name, or a number from 0 for rows that are lists
    prompt: _Column | None = None  # column of a text that precedes the text and is not learnt
    pair: _Column | None = None  # column of a second text, to classify both together
    label: _Column | None = None  # column of the class or number; null: the text is learnt, token by token
    labels: tuple[str, ...] = ()  # names of the classes, in the order of their numbers; empty: numbers from 0
    label_type: Literal["class", "number"] = "class"  # number: a regression
    separator: str = ""  # text between prompt and text; not learnt
    max_length: Annotated[int, Range(ge=2)] = 512  # tokens per row; longer rows are truncated at the end
    pad_to_multiple: Annotated[int, Range(ge=1)] = 1  # pad batches to multiples of this many tokens
    part: tuple[_Share, _Share] = (0.0, 1.0)  # part of the shuffled rows, as shares: [start, end]
    split_seed: int = 0  # seed of the shuffling; use the same in every part of a split
    quotes: bool = True  # CSV and TSV: fields may be in double quotes; false: quotes are plain characters
    trust_remote_code: bool | Literal["known"] = False  # true: Python files in the folder are run

    def __post_init__(self) -> None:
        if self.part[0] >= self.part[1]:
            raise ValueError("part must be [start, end] with start < end, e.g. [0, 0.92] or [0.92, 1]")
        if self.label is None:
            for name, given in (("labels", self.labels != ()), ("pair", self.pair is not None)):
                if given:
                    raise ValueError(
                        f"{name} works only with label, the column of the classes; set label, or remove"
                        f" {name}"
                    )
        elif self.prompt is not None:
            raise ValueError("prompt cannot be used with label; use pair to classify two texts")
        if self.labels and self.label_type == "number":
            raise ValueError("labels cannot be used with label_type: number; remove one of the two")
        if twice := sorted({name for name in self.labels if self.labels.count(name) > 1}):
            raise ValueError(f"labels: {twice[0]!r} is listed twice; give each class its own name")


@dataclass(frozen=True)
class PyAVConfig:
    """Config of the video reader `pyav`: decoding with FFmpeg through PyAV."""

    max_pixels: Annotated[int, Range(ge=1)] = 4096 * 4096  # largest frame in pixels; larger ones are refused


@dataclass(frozen=True)
class DecordConfig(PyAVConfig):
    """Config of the video reader `decord`."""


@dataclass(frozen=True)
class TorchcodecConfig(PyAVConfig):
    """Config of the video reader `torchcodec`."""
