"""The further fields of the samples of `media_text`: control clips and numbers beside clip and caption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm_core.builtin.configs.data import MediaTextConfig
from mm_core.contracts import Randomness, Transform, VideoReader
from mm_core.data.media.images import read_photo
from mm_core.data.media.limits import decoding
from mm_core.data.media.transforms import read_pixels, transformed
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.media_rows import MediaRow
from mm_core.data.rows.sources import OpenedSource


@dataclass(frozen=True)
class FurtherFields:
    """Reads the further fields of rows, which all sources have alike, as a dataset reads its clips."""

    wanted: MediaTextConfig
    reader: VideoReader
    transform: Transform
    sources: Sequence[OpenedSource]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each field, by name."""
        return {each.name: each.kind for each in self.wanted.sources[0].columns.fields}

    def of(self, row: MediaRow) -> dict[str, Path | float | tuple[Path, ...]]:
        """The files and numbers of a row by field. DataError if a path cannot be used."""
        folder, found = self.sources[row.source].folder, dict[str, Path | float | tuple[Path, ...]]()
        for (name, kind), cell in zip(self.kinds.items(), row.fields, strict=True):
            if kind == "images":
                found[name] = tuple(inside(folder, path) for path in json.loads(cell))
            else:
                found[name] = inside(folder, cell) if kind == "clip" else float(cell)
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
                found[name] = tuple(self._photo(path)[:, None] for path in value)
            elif isinstance(value, Path):
                found[name] = self._pixels(value, times, size, rng)
            else:
                found[name] = torch.tensor(value)
        return found

    def _pixels(
        self, path: Path, times: Sequence[float], size: tuple[int, int], rng: Randomness | None
    ) -> Tensor:
        if times:
            return read_pixels(self.reader, self.transform, path, lambda info: times, size, rng)[0]
        photo = self._photo(path).permute(1, 2, 0)[None]
        return transformed(self.transform, photo, size, rng, str(path))

    def _photo(self, path: Path) -> Tensor:
        with decoding(str(path)):
            return read_photo(path, self.wanted.max_pixels)
