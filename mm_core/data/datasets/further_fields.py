"""The further fields of samples of `media_text`: control clips, pictures, numbers beside clip and caption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm_core.builtin.configs.data import MediaField, MediaTextConfig
from mm_core.contracts import Randomness, Transform, VideoReader
from mm_core.data.media.frames import read_all, read_frames
from mm_core.data.media.images import read_photo
from mm_core.data.media.transforms import read_pixels, transformed
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.media_rows import MediaRow, further_files
from mm_core.data.rows.sources import OpenedSource
from mm_core.errors import DataError


@dataclass(frozen=True)
class FurtherFields:
    """Reads the further fields of rows, which all sources have alike, as a dataset reads its clips."""

    wanted: MediaTextConfig
    reader: VideoReader
    transform: Transform
    sources: Sequence[OpenedSource]

    def fields(self, row: MediaRow) -> tuple[MediaField, ...]:
        """Those of a row: names and kinds are those of every row, columns may differ between sources."""
        return self.wanted.sources[row.source].columns.fields

    def of(self, row: MediaRow) -> dict[str, Path | float | tuple[Path, ...]]:
        """The files and numbers of a row by field. DataError if a path cannot be used."""
        folder, found = self.sources[row.source].folder, dict[str, Path | float | tuple[Path, ...]]()
        for each, cell in zip(self.fields(row), row.fields, strict=True):
            if each.kind == "images":
                found[each.name] = tuple(inside(folder, path) for path in json.loads(cell))
            else:
                found[each.name] = inside(folder, cell) if each.kind == "clip" else float(cell)
        return found

    def read(
        self, row: MediaRow, times: Sequence[float], size: tuple[int, int], rng: Randomness | None
    ) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """The fields of a sample: pixels uint8 [3,F,Y,X] of a `size`, with the crop and flip of its clip, at
        the `times` of its frames (none: it is a picture), pictures uint8 [3,1,Y,X] of their own size, and
        numbers. DataError if a file cannot be read."""
        found: dict[str, Tensor | tuple[Tensor, ...]] = {}
        for name, value in self.of(row).items():
            if isinstance(value, tuple):
                found[name] = tuple(self.photo(path).permute(3, 0, 1, 2) for path in value)
            elif isinstance(value, float):
                found[name] = torch.tensor(value)
            elif times:
                found[name], _ = read_pixels(self.reader, self.transform, value, lambda _: times, size, rng)
            else:
                found[name] = transformed(self.transform, self.photo(value), size, rng, str(value))
        return found

    def photo(self, path: Path) -> Tensor:
        """uint8 [1,Y,X,3] of a picture."""
        return read_photo(path, self.wanted.max_pixels).permute(1, 2, 0)[None]

    def faults(self, row: MediaRow, last: float | None) -> Iterator[DataError]:
        """Decodes the files of a row's fields, clips to their last frame: the error of each that cannot be
        used. `last`: seconds up to which training may read the row's clip; None: it is a picture."""
        folder = self.sources[row.source].folder
        for field, name, _ in further_files(row, self.fields(row)):
            try:
                path = inside(folder, name)
                if field.kind == "images" or last is None:
                    frames = self.photo(path)
                else:
                    frames = read_all(self.reader, path, self.reader.probe(path))
                    read_frames(self.reader, path, [last])
                if field.kind == "clip":
                    self.try_transform(frames, str(path))
            except DataError as fault:
                fault.what = f"in the column {field.place!r} of {folder / row.path}: {fault.what}"
                yield fault

    def try_transform(self, frames: Tensor, name: str) -> None:
        """DataError if the transform refuses frames of this size; in buckets the size is not known."""
        if self.wanted.height is not None and self.wanted.width is not None:
            transformed(self.transform, frames, (self.wanted.height, self.wanted.width), None, name)
