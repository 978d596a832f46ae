"""Reading image files, and resizing images to a clip's size."""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageCms, ImageOps
from torch import Tensor

from mm_core.data.media.image_headers import check_still, opened_image


def read_image(path: Path) -> Tensor:
    """Reads an image file as RGB uint8 [3,Y,X], upright by its EXIF orientation.

    Raises:
        DataError: the file is not a readable image, or so large that Pillow suspects an attack.
    """
    with opened_image(path) as opened:
        image = _eight_bits(ImageOps.exif_transpose(opened)).convert("RGB")
    return _tensor(image)


def read_photo(path: Path, max_pixels: int) -> Tensor:
    """Reads an image file for training: as `read_image`, with what is transparent over white, and CMYK by the
    file's own colour profile.

    Args:
        path: the file.
        max_pixels: larger images are refused before they are decoded.

    Raises:
        DataError: the file is not a readable image of one frame, or too large.
    """
    with opened_image(path, max_pixels) as opened:
        check_still(opened, path)
        image = _eight_bits(ImageOps.exif_transpose(opened))
        if image.mode == "CMYK" and (profile := image.info.get("icc_profile")):
            with suppress(ImageCms.PyCMSError, OSError):  # a damaged profile: converted without it
                own, srgb = ImageCms.ImageCmsProfile(BytesIO(profile)), ImageCms.createProfile("sRGB")
                image = ImageCms.profileToProfile(image, own, srgb, outputMode="RGB") or image
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    return _tensor(image)


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with 8-bit shades: the upper 8 of 16 bits, where Pillow would clip bright shades to white.
    ValueError for pixel values without a defined black and white."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    whole = image.convert("I")
    values = numpy.asarray(whole)
    if image.mode == "F" or not 0 <= values.min() <= values.max() < 1 << 16:
        raise ValueError(f"its pixels (Pillow's mode {image.mode}) are not shades of 8 or 16 bits")
    return whole.point(lambda shade: shade * (1 / 256)).convert("L")


def fit_image(image: Tensor, height: int, width: int) -> Tensor:
    """Resizes an image to a clip's size with Pillow's Lanczos filter: float32 [3,height,width] in [-1,1].

    An image of another aspect ratio is stretched, as in Diffusers' image-to-video pipelines: crop it before
    to avoid that.

    Args:
        image: uint8 [3,Y,X].
        height: of the clip.
        width: of the clip.
    """
    picture = Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return 2.0 * (_tensor(picture).float() / 255.0) - 1.0


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
