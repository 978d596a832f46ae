"""Tiles of images and videos for InternVL: counted from file headers, and their pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import VideoReader
from mm_core.data import decoding, read_frames, read_image
from mm_core.errors import DataError
from mm_internvl.data.chat import Shown
from mm_internvl.data.rows import Medium, Picture
from mm_internvl.data.tiling import Tiling, image_size


@dataclass(frozen=True)
class Pictures:
    """Cuts the images and video frames of a conversation into tiles.

    Attributes:
        tiling: sizes and number of tiles.
        frames: largest number of frames per video.
        max_pixels: larger images are refused, by their header.
        reader: decoder for videos.
        share_tiles: whether all images of a row share `max_tiles`.
    """

    tiling: Tiling
    frames: int
    max_pixels: int
    reader: VideoReader
    share_tiles: bool = False

    def shown(self, files: Sequence[tuple[Medium, Picture]]) -> list[Shown]:
        """Counts the tiles of a conversation's images and videos, from their file headers.

        Raises:
            DataError: a file cannot be read, or is too large.
        """
        tiling = self._tiling(files)
        return [self._shown(kind, path, tiling) for kind, path in files]

    def pixels(self, files: Sequence[tuple[Medium, Picture]], shown: Sequence[Shown], first: int) -> Tensor:
        """Reads the tiles of a conversation's images and videos.

        Args:
            files: the row's files.
            shown: their tile counts, from `shown`.
            first: number of files to read; the others are skipped.

        Returns:
            Tiles float32 [N,3,Y,X].

        Raises:
            DataError: a file cannot be read.
        """
        tiling = self._tiling(files)
        read = zip(files[:first], shown, strict=False)
        return torch.cat([self._none(), *(self._pixels(path, medium, tiling) for (_, path), medium in read)])

    def _tiling(self, files: Sequence[tuple[Medium, Picture]]) -> Tiling:
        images = sum(kind == "image" for kind, _ in files)
        return self.tiling.shared(images) if self.share_tiles else self.tiling

    def _shown(self, kind: Medium, path: Picture, tiling: Tiling) -> Shown:
        if kind == "image":
            return Shown(kind, (tiling.count(*image_size(path, self.max_pixels)),))
        assert isinstance(path, Path)
        with decoding(str(path)):
            found = self.reader.probe(path).num_frames
        return Shown(kind, (1,) * min(self.frames, found))

    def _pixels(self, path: Picture, medium: Shown, tiling: Tiling) -> Tensor:
        if medium.kind == "image":
            tiles = tiling.cut(read_image(path))
            if len(tiles) != medium.tiles[0]:
                raise DataError(
                    "the image's size differs from the size in its header",
                    where=str(path),
                    hint="replace the file: it is damaged, or changed while it was read",
                )
            return tiles
        assert isinstance(path, Path)
        with decoding(str(path)):
            info = self.reader.probe(path)
        count = len(medium.tiles)
        # The middle frame of each of `count` equal parts, as in Transformers' InternVLVideoProcessor.
        frames = [math.floor((part + 0.5) * info.num_frames / count) for part in range(count)]
        clip = read_frames(self.reader, path, [(frame + 0.5) / info.fps for frame in frames])
        return torch.cat([self.tiling.frame(frame.permute(2, 0, 1)) for frame in clip])

    def _none(self) -> Tensor:
        """float32 [0,3,Y,X]."""
        return torch.empty(0, 3, self.tiling.height, self.tiling.width)
