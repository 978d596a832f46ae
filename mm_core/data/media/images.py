"""Image files, and their pixels at a clip's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError, MMError


def read_image(path: Path) -> Tensor:
    """uint8 [3,Y,X], upright (by its EXIF orientation) and in colour. DataError for what is no readable
    image, or so large that Pillow takes it for an attack."""
    with opened_image(path) as opened:
        image = _eight_bits(ImageOps.exif_transpose(opened)).convert("RGB")
    return _tensor(image)


@contextmanager
def opened_image(path: Path) -> Iterator[ImageFile.ImageFile]:
    """Pillow's image, of which only the header is read. DataError for what is no readable image, also where
    that shows in the block: its decoders raise whatever a damaged file makes of them."""
    plain_file(path, "image", missing="there is no such image")
    try:
        with Image.open(path) as opened:
            yield opened
    except MMError:
        raise
    except Exception as fault:
        raise DataError(f"the image cannot be read: {fault}", where=str(path)) from fault


def _eight_bits(image: Image.Image) -> Image.Image:
    """Of 16 bits the upper eight, where Pillow would cut everything brighter to white. ValueError for numbers
    that do not say what is black and what white."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    whole = image.convert("I")
    values = numpy.asarray(whole)
    if image.mode == "F" or not 0 <= values.min() <= values.max() < 1 << 16:
        raise ValueError(f"its pixels are numbers (Pillow's mode {image.mode}), not shades of 8 or 16 bits")
    return whole.point(lambda shade: shade * (1 / 256)).convert("L")


def fit_image(image: Tensor, height: int, width: int) -> Tensor:
    """float32 [3,height,width] in [-1,1] of uint8 [3,Y,X], by Pillow's Lanczos filter. An image of another
    shape is stretched, as Diffusers' image-to-video pipelines do it: crop it before if that is not wanted."""
    picture = Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return 2.0 * (_tensor(picture).float() / 255.0) - 1.0


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
