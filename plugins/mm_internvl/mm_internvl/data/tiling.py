"""Dynamic high resolution: cuts an image into tiles of the vision tower's input size.

InternVL 1.5 (https://arxiv.org/abs/2404.16821, section 3.2): of all grids with min_tiles to max_tiles
tiles, the one with the aspect ratio closest to the image's is used. The image is resized to it and cut; a
thumbnail of the complete image follows if there is more than one tile. The results equal those of
Transformers' `GotOcr2ImageProcessor` with `crop_to_patches`, the processor named in published InternVL
folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mm_core.errors import CheckpointError
from mm_core.weights import read_mapping

_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Tiling:
    """How InternVL cuts images into tiles.

    Attributes:
        height: height of a tile in pixels.
        width: width of a tile in pixels.
        min_tiles: fewest tiles of a grid.
        max_tiles: most tiles of a grid.
        mean: mean of RGB in [0, 1], for normalisation.
        std: standard deviation of RGB in [0, 1].
        resample: number of Pillow's filter (3: bicubic).
        thumbnail: whether a thumbnail follows several tiles.
    """

    height: int = 448
    width: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    resample: int = 3
    thumbnail: bool = True

    def shared(self, images: int) -> Tiling:
        """The tiling for a row with several images: each has an equal part of max_tiles, at least one, as in
        OpenGVLab's training (internvl_chat/internvl/train/internvl_chat_finetune.py)."""
        most = max(1, self.max_tiles // max(1, images))
        return replace(self, min_tiles=min(self.min_tiles, most), max_tiles=most)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles for an image of this size in pixels."""
        if self.max_tiles == 1:
            return 1, 1
        best, least = (1, 1), float("inf")
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            difference = abs(width / height - columns / rows)
            # Among grids of one shape, the larger one if the image fills more than half of it.
            fills = height * width > 0.5 * self.height * self.width * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best

    def count(self, height: int, width: int) -> int:
        """Number of tiles for an image of this size in pixels, including its thumbnail."""
        columns, rows = self.grid(height, width)
        return columns * rows + self._followed(columns * rows)

    def cut(self, image: Tensor) -> Tensor:
        """Cuts an image, uint8 [3,Y,X], into normalised tiles float32 [N,3,height,width]: row by row, then
        the thumbnail."""
        columns, rows = self.grid(*image.shape[-2:])
        whole = self._resized(image, rows * self.height, columns * self.width)
        tiles = whole.view(3, rows, self.height, columns, self.width)
        tiles = tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)  # [rows*columns,3,Y,X]
        if self._followed(len(tiles)):
            tiles = torch.cat([tiles, self._resized(image, self.height, self.width)[None]])
        return self._normalised(tiles)

    def frame(self, image: Tensor) -> Tensor:
        """Turns a video frame, uint8 [3,Y,X], into one normalised tile float32 [1,3,height,width]."""
        return self._normalised(self._resized(image, self.height, self.width)[None])

    def blank(self) -> Tensor:
        """A tile of the mean colour, float32 [1,3,height,width], for batches without an image."""
        return torch.zeros(1, 3, self.height, self.width)

    def _followed(self, tiles: int) -> bool:
        """Whether a thumbnail follows this number of tiles."""
        return self.thumbnail and tiles > 1

    def _resized(self, image: Tensor, height: int, width: int) -> Tensor:
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        picture = picture.resize((width, height), Image.Resampling(self.resample))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()

    def _normalised(self, tiles: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]
        return (tiles / 255.0 - mean) / std


@lru_cache
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) with `least` to `most` tiles, smaller ones first."""
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def read_tiling(folder: Path, min_tiles: int | None = None, max_tiles: int | None = None) -> Tiling:
    """Reads how InternVL cuts images into tiles from a model's folder.

    `dynamic_image_size` and `use_thumbnail` in config.json come from OpenGVLab: false means one tile per
    image, and no thumbnail. `crop_to_patches` of an image processor is ignored: it is false in every
    published folder, and `InternVLProcessor` cuts images all the same.

    Args:
        folder: folder of the model.
        min_tiles: overrides the folder's value.
        max_tiles: overrides the folder's value.

    Raises:
        CheckpointError: files cannot be read, or describe another way of cutting.
    """
    found, model = _image_processor(folder), read_object(folder / "config.json")
    known = Tiling()
    size = found.get("size", {})
    if isinstance(size, int):  # in OpenGVLab's own layout
        size = {"height": size, "width": size}
    if not isinstance(size, Mapping) or not set(size) <= {"height", "width"}:
        raise CheckpointError(
            f"the image processor's size {size!r} is not the height and width of tiles",
            where=str(folder),
            accepted='{"height": 448, "width": 448}',
        )
    if model.get("pad2square"):
        raise CheckpointError(
            "pad2square is set: images padded to a square before they are cut are not supported",
            where=str(folder / "config.json"),
            accepted="pad2square: false, as in InternVL 1.5 to 3.5",
        )
    whole = model.get("dynamic_image_size") is False and max_tiles is None
    least, most = (1, 1) if whole else (_least(found, model), _most(found, model))
    tiling = replace(
        known,
        height=int(size.get("height", known.height)),
        width=int(size.get("width", known.width)),
        min_tiles=min_tiles or least,
        max_tiles=max_tiles or most,
        mean=tuple(found.get("image_mean", known.mean)),
        std=tuple(found.get("image_std", known.std)),
        resample=int(found.get("resample", known.resample)),
        thumbnail=model.get("use_thumbnail") is not False,
    )
    if not 1 <= tiling.min_tiles <= tiling.max_tiles:
        raise CheckpointError(
            f"an image cannot be cut into {tiling.min_tiles} to {tiling.max_tiles} tiles",
            where=str(folder),
            hint="set both min_tiles and max_tiles of the dataset",
        )
    return tiling


def tiles_of(folder: Path) -> dict[str, int]:
    """Tile limits of a folder's image processor, with the keys of OpenGVLab's config.json."""
    found = _image_processor(folder)
    words = {"min_patches": "min_dynamic_patch", "max_patches": "max_dynamic_patch"}
    return {theirs: int(found[ours]) for ours, theirs in words.items() if ours in found}


def _least(processor: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    return int(processor.get("min_patches", model.get("min_dynamic_patch", Tiling.min_tiles)))


def _most(processor: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    return int(processor.get("max_patches", model.get("max_dynamic_patch", Tiling.max_tiles)))


def _image_processor(folder: Path) -> Mapping[str, Any]:
    """Settings of the folder's image processor, from its own file or the processor's file."""
    for name in _FILES:
        found = read_object(folder / name)
        part = found.get("image_processor", found if name == _FILES[0] else None)
        if isinstance(part, Mapping):
            return part
    return {}


def read_object(file: Path) -> Mapping[str, Any]:
    """Reads a JSON object from a file of a model's folder; {} if the file does not exist.

    Raises:
        CheckpointError: the file contains something else.
    """
    found = read_mapping(file)
    if not found and file.exists():
        raise CheckpointError(
            "the file contains no JSON object, or an empty one",
            where=str(file),
            hint="download the file again",
        )
    return found


def tokens_of_tile(folder: Path) -> int:
    """Number of tokens per tile of an InternVL model: from its processor, its config, or its sizes.

    Raises:
        CheckpointError: the folder's files do not contain it.
    """
    model = read_object(folder / "config.json")
    for config in (read_object(folder / "processor_config.json"), model):
        found = config.get("image_seq_length")
        if isinstance(found, int) and found > 0:
            return found
    vision = model.get("vision_config", {})
    try:
        side = model.get("force_image_size") or _side(vision["image_size"])
        return int((side // _side(vision["patch_size"]) * model["downsample_ratio"]) ** 2)
    except (KeyError, TypeError, ValueError) as fault:
        raise CheckpointError(
            f"config.json does not define the number of tokens per tile: {fault!r}",
            where=str(folder / "config.json"),
            accepted="image_seq_length; or image_size and patch_size of vision_config, and downsample_ratio",
        ) from None


def _side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]
