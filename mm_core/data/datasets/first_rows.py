"""Errors of the files of datasets that their first rows show: for `mm validate` and the plan.

What is not there yet is no error here: `mm validate` and the plan list it as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.data.datasets.text_table import read_texts
from mm_core.data.media.image_headers import TooLargeError, image_size
from mm_core.data.rows.annotations import inside, read_annotations
from mm_core.data.rows.json_rows import checkable
from mm_core.data.rows.media_rows import Medium, further_files
from mm_core.data.rows.paths import check_folder, status
from mm_core.data.rows.sources import HEAD, head
from mm_core.errors import DataError, MMError, plural
from mm_core.files import absent


def of_video_text(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Errors of the annotations of a `video_text` with these options."""
    file, folder = Path(options["annotations"]), options["folder"]
    try:
        if folder is not None and checkable(Path(folder)):
            check_folder(Path(folder), "the folder of the videos")
        if checkable(file):
            read_annotations(file, HEAD)
    except DataError as fault:
        yield fault


def of_text_rows(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Errors of the table of a `text_rows` with these options."""
    wanted = TextRowsConfig(**options)
    if not checkable(Path(wanted.file)):
        return
    try:
        for _ in read_texts(wanted, HEAD):
            pass
    except DataError as fault:
        yield fault


def of_media_text(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Errors of the sources of a `media_text` with these options. Damaged files are left to training, which
    skips them."""
    for source in options["sources"]:
        if any(absent(Path(path)) for path in (source.annotations, source.folder) if path is not None):
            continue
        try:
            folder, rows = head(source)
        except DataError as fault:
            yield fault
            continue
        files: dict[str, list[tuple[str, Medium]]] = {}
        for row in rows:
            if row.archive is None:
                files.setdefault("", []).append((row.path, row.medium))
            for field, path, medium in further_files(row, source.columns.fields):
                files.setdefault(f"in the column {field.place!r} ", []).append((path, medium))
        for column, named in files.items():
            of = f"of the first {plural(len(named), 'file')} {column}of {source.annotations}"
            yield from _faults(folder, of, named, options["max_pixels"])


def _faults(folder: Path, of: str, files: Sequence[tuple[str, Medium]], max_pixels: int) -> Iterator[MMError]:
    """Errors of files that are missing, or refused if they are whole: outside their folder or too large."""
    missing = [path for path, _ in files if status(folder / path, "file") is None]
    if missing:
        yield DataError(
            f"{len(missing)} {of} cannot be found, such as {missing[0]}",
            where=str(folder),
            hint="correct the paths, or set `folder` of the source",
        )
    refused: dict[type[DataError], list[DataError]] = {}
    for name, medium in files:
        path = None
        try:
            path = inside(folder, name)
            if medium == "image":
                image_size(path, max_pixels)
        except DataError as fault:
            if path is None or isinstance(fault, TooLargeError):  # else it is damaged
                refused.setdefault(type(fault), []).append(fault)
    for first, *others in refused.values():
        what = f"{1 + len(others)} {of} would be refused, such as {first.where}: {first.what}"
        yield DataError(what, where=str(folder), accepted=first.accepted, hint=first.hint)
