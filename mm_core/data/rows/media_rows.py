"""Rows of images and clips: what is known of each without decoding it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

Medium = Literal["image", "clip"]

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp"})
CLIPS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".gif"})
"""Suffixes of files, in lower case."""

CAPTIONS = ".txt"
"""Suffix of the file beside an image or clip that contains its caption."""

_SIDES = re.compile(r"\s*(\d+)\s*[x×*,]\s*(\d+)\s*")


@dataclass(frozen=True)
class MediaRow:
    """An image or clip with its captions. Sizes are what its row declares, not what its file has.

    Attributes:
        source: number of its source.
        path: in the folder of the source; with `archive`, in the archive.
        captions: its texts; (): the text file beside it.
        archive: number of its archive in the source; None: it is a file.
        start: of its bytes in the archive.
        size: in bytes, in an archive.
        num_frames: None where the row declares none, like the others.
    """

    source: int
    path: str
    captions: tuple[str, ...]
    archive: int | None = None
    start: int = 0
    size: int = 0
    num_frames: int | None = None
    fps: float | None = None
    height: int | None = None
    width: int | None = None

    @property
    def medium(self) -> Medium:
        """Whether the row is an image, by its suffix. Everything else is left to the video reader."""
        return medium_of(self.path) or "clip"


def medium_of(path: str) -> Medium | None:
    """The kind of a file in a row by its suffix; None for other files."""
    suffix = PurePosixPath(path).suffix.lower() if "." in path else ""
    return "image" if suffix in IMAGES else "clip" if suffix in CLIPS else None


def declared(cells: Mapping[str, object]) -> dict[str, int | float | None]:
    """The sizes that a row declares: `num_frames`, `fps`, `height` and `width`; None for unusable values.

    Args:
        cells: these columns, and `resolution`, by these names.
    """
    height, width = _sides(cells.get("resolution"))
    return {
        "num_frames": _whole(cells.get("num_frames")),
        "fps": _positive(cells.get("fps")),
        "height": _whole(cells.get("height")) or height,
        "width": _whole(cells.get("width")) or width,
    }


def _sides(value: object) -> tuple[int | None, int | None]:
    """(height, width) of {height, width}, [height, width] or "480x832"."""
    if isinstance(value, Mapping):
        return _whole(value.get("height")), _whole(value.get("width"))
    if isinstance(value, str) and (match := _SIDES.fullmatch(value)):
        return int(match[1]), int(match[2])
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


def _positive(value: object) -> float | None:
    number = number_of(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return float(number) if 0 < number < math.inf else None


def _whole(value: object) -> int | None:
    number = _positive(value)
    return int(number) if number is not None and number == int(number) else None
