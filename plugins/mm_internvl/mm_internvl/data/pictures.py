"""What images and videos are to the model: their tiles, counted from headers, and the pixels of those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import VideoReader
from mm_core.data import read_image
from mm_core.errors import DataError
from mm_internvl.data.chat import Shown
from mm_internvl.data.rows import Medium
from mm_internvl.data.tiling import Tiling, image_size


@dataclass(frozen=True)
class Pictures:
    """Cuts images and frames into tiles. frames: of a video. max_pixels: of an image; larger ones are refused
    by their header. share_tiles: the images of a row have `max_tiles` together."""

    tiling: Tiling
    frames: int
    max_pixels: int
    reader: VideoReader
    share_tiles: bool = False

    def shown(self, files: Sequence[tuple[Medium, Path]]) -> list[Shown]:
        """The tiles of a row's files, by their headers. DataError for one that cannot be read or is too
        large."""
        tiling = self._tiling(files)
        return [self._shown(kind, path, tiling) for kind, path in files]

    def pixels(self, files: Sequence[tuple[Medium, Path]], shown: Sequence[Shown], first: int) -> Tensor:
        """float32 [N,3,Y,X] of the tiles of the first so many of a row's files. DataError for one that
        cannot be read."""
        tiling = self._tiling(files)
        read = zip(files[:first], shown, strict=False)
        return torch.cat([self._none(), *(self._pixels(path, medium, tiling) for (_, path), medium in read)])

    def _tiling(self, files: Sequence[tuple[Medium, Path]]) -> Tiling:
        images = sum(kind == "image" for kind, _ in files)
        return self.tiling.shared(images) if self.share_tiles else self.tiling

    def _shown(self, kind: Medium, path: Path, tiling: Tiling) -> Shown:
        if kind == "image":
            return Shown(kind, (tiling.count(*image_size(path, self.max_pixels)),))
        return Shown(kind, (1,) * min(self.frames, self.reader.probe(path).num_frames))

    def _pixels(self, path: Path, medium: Shown, tiling: Tiling) -> Tensor:
        if medium.kind == "image":
            tiles = tiling.cut(read_image(path))
            if len(tiles) != medium.tiles[0]:
                raise DataError("the image has another size than its header says", where=str(path))
            return tiles
        info = self.reader.probe(path)
        count = len(medium.tiles)
        # In the middle of equal parts, as Transformers' InternVLVideoProcessor takes them.
        frames = [math.floor((part + 0.5) * info.num_frames / count) for part in range(count)]
        clip = self.reader.read(path, [(frame + 0.5) / info.fps for frame in frames])
        return torch.cat([self.tiling.frame(frame.permute(2, 0, 1)) for frame in clip])

    def _none(self) -> Tensor:
        """float32 [0,3,Y,X]."""
        return torch.empty(0, 3, self.tiling.height, self.tiling.width)
