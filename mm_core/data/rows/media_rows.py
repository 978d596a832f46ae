"""Rows of images and clips: what is known of each without decoding it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mm_core.errors import plural

if TYPE_CHECKING:
    import numpy as np

    from mm_core.builtin.configs.data import MediaField

Medium = Literal["image", "clip"]

IMAGES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".avif", ".heic", ".heif"}
)
CLIPS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".gif"})
CLIPS |= {".flv", ".wmv", ".3gp"}
"""Suffixes of files, in lower case."""

_MEDIA: Mapping[str, Medium] = {**dict.fromkeys(CLIPS, "clip"), **dict.fromkeys(IMAGES, "image")}

CAPTIONS = ".txt"
"""Suffix of the file beside an image or clip that contains its caption."""

_LIMIT = 2**31  # of the numbers in files of rows
_SIDES = re.compile(r"\s*(\d+)\s*[x×*,]\s*(\d+)\s*")
_UNNAMEABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # no file name has these


class MediaRow(NamedTuple):
    """An image or clip with its captions. Sizes are what its row declares, not what its file has.

    Attributes:
        source: number of its source.
        path: in the folder of the source; with `archive`, in the archive.
        medium: by its suffix; what has none of an image is left to the video reader, which knows images too.
        captions: its texts; (): the text file beside it.
        num_frames: None where the row declares none, like the other sizes.
        archive: number of its archive in the source; None: it is a file.
        start: of its bytes in the archive.
        size: in bytes, in an archive.
        fields: the cells of the source's further fields, in their order.
    """

    source: int
    path: str
    medium: Medium
    captions: tuple[str, ...]
    num_frames: int | None = None
    fps: float | None = None
    height: int | None = None
    width: int | None = None
    archive: int | None = None
    start: int = 0
    size: int = 0
    fields: tuple[str, ...] = ()


class RowBlock(NamedTuple):
    """Rows of images and clips in arrays, as `MappedRows` has them.

    Attributes:
        facts: structured array [N].
        text: paths and captions: uint8.
        ends: of each row's text: int64 [N].
    """

    facts: np.ndarray[Any, np.dtype[np.void]]
    text: np.ndarray[Any, np.dtype[np.uint8]]
    ends: np.ndarray[Any, np.dtype[np.int64]]


def medium_of(path: str) -> Medium | None:
    """The kind of a file in a row by its suffix; None for other files."""
    return _MEDIA.get(path[path.rfind(".") :].lower())


class Declared(NamedTuple):
    """The sizes that a row declares; None where it declares none, or nothing usable."""

    num_frames: int | None = None
    fps: float | None = None
    height: int | None = None
    width: int | None = None


def declared(num_frames: Any, fps: Any, resolution: Any, height: Any, width: Any) -> Declared:
    """The sizes in the cells of a row; sides of their own come before those of the resolution."""
    sides = (None, None) if resolution is None else _sides(resolution)
    return Declared(
        None if num_frames is None else _whole(num_frames),
        None if fps is None else _positive(fps),
        (None if height is None else _whole(height)) or sides[0],
        (None if width is None else _whole(width)) or sides[1],
    )


def _sides(value: object) -> tuple[int | None, int | None]:
    """(height, width) of {height, width}, [height, width] or "480x832"."""
    if isinstance(value, Mapping):
        return _whole(value.get("height")), _whole(value.get("width"))
    if isinstance(value, str) and (match := _SIDES.fullmatch(value)):
        return _whole(match[1]), _whole(match[2])
    if isinstance(value, list) and len(value) == 2:
        return _whole(value[0]), _whole(value[1])
    return None, None


def number_of(value: object) -> object:
    """The number that a text contains, for tables whose cells are all text; other values as they are."""
    if isinstance(value, str):
        try:
            return float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            return value
    return value


def paths_of(cell: object) -> list[str] | None:
    """The paths in a cell: a list of them, also as JSON, one, or none; None for anything else."""
    if isinstance(cell, str):
        with suppress(ValueError):
            cell = json.loads(cell) if cell.startswith("[") else [cell] if cell else []
    found = [] if cell is None else cell
    return found if isinstance(found, list) and all(map(_is_path, found)) else None


def _is_path(cell: object) -> bool:
    return isinstance(cell, str) and cell != "" and not _UNNAMEABLE.search(cell)


def field_text(kind: str, cell: object) -> str:
    """The cell of a further field as `MediaRow.fields` has it: several paths as JSON."""
    return json.dumps(paths_of(cell)) if kind == "images" else str(cell)


def further_files(row: MediaRow, fields: Sequence[MediaField]) -> Iterator[tuple[MediaField, str, Medium]]:
    """Each file of a row's further fields: the field, its path, and its medium: a clip field of a picture is
    a picture."""
    for field, cell in zip(fields, row.fields, strict=True):
        for path in json.loads(cell) if field.kind == "images" else [cell] if field.kind == "clip" else []:
            yield field, path, "image" if field.kind == "images" else row.medium


def field_fault(name: str, kind: str, cell: object, most: int) -> str | None:
    """Why the cell of a further field cannot be used."""
    if kind == "images":
        paths = paths_of(cell)
        if paths is None:
            return f"the field `{name}` is {cell!r}, not a path or a list of paths"
        few = len(paths) <= most
        return None if few else f"the field `{name}` has {plural(len(paths), 'path')}, but `most` is {most}"
    if kind == "number":
        number = number_of(cell)
        usable = isinstance(number, (int, float)) and not isinstance(number, bool) and isfinite(number)
        return None if usable else f"the field `{name}` is {cell!r}, not a number"
    return None if _is_path(cell) else f"the field `{name}` is {cell!r}, not a path"


def _positive(value: object) -> float | None:
    number = number_of(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return float(number) if 0 < number < _LIMIT else None


def _whole(value: object) -> int | None:
    if type(value) is int and 0 < value < _LIMIT:  # most are, of a million rows
        return value
    number = _positive(value)
    return int(number) if number is not None and number == int(number) else None


SIZES: Mapping[str, Callable[[object], Any]] = {
    **{"num_frames": _whole, "fps": _positive},
    **{"resolution": _sides, "height": _whole, "width": _whole},
}
"""What a cell of each column of sizes declares: a number, or (height, width)."""
