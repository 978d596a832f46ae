"""Errors of the sources of `media_text` that their first rows show: for `mm validate` and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mm_core.data.media.image_headers import TooLargeError, image_size
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.media_rows import MediaRow
from mm_core.data.rows.paths import status
from mm_core.data.rows.sources import head
from mm_core.errors import DataError, MMError, plural


def faults(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Errors of the sources that their first rows show. Damaged files are left to training, which skips them.

    Args:
        options: of the dataset.
    """
    for source in options["sources"]:
        try:
            folder, rows = head(source)
        except DataError as fault:
            yield fault
            continue
        files = [row for row in rows if row.archive is None]
        of = f"of the first {plural(len(files), 'file')} of {source.annotations}"
        missing = [row.path for row in files if status(folder / row.path, "file") is None]
        if missing:
            yield DataError(
                f"{len(missing)} {of} cannot be found, such as {missing[0]}",
                where=str(folder),
                hint="correct the paths, or set `folder` of the source",
            )
        refused: dict[type[DataError], list[DataError]] = {}
        for row in files:
            if each := _refused(folder, row, options["max_pixels"]):
                refused.setdefault(type(each), []).append(each)
        for first, *others in refused.values():
            what = f"{1 + len(others)} {of} would be refused, such as {first.where}: {first.what}"
            yield DataError(what, where=str(folder), accepted=first.accepted, hint=first.hint)


def _refused(folder: Path, row: MediaRow, max_pixels: int) -> DataError | None:
    """Why a file is refused wherever it is whole: it lies outside its folder, or is too large."""
    try:
        path = inside(folder, row.path)
    except DataError as outside:
        return outside
    try:
        if row.medium == "image":
            image_size(path, max_pixels)
    except TooLargeError as large:
        return large
    except DataError:
        pass  # damaged
    return None
