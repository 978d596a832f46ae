"""Reading image files, and resizing images to a clip's size."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageChops, ImageCms, ImageOps
from torch import Tensor

from mm_core.data.media.image_headers import InMemory, check_still, count_frames, opened_image
from mm_core.errors import DataError


def read_image(path: Path | InMemory) -> Tensor:
    """Reads an image file, or its bytes, as RGB uint8 [3,Y,X], upright by its EXIF orientation.

    Raises:
        DataError: the file is not a readable image, or so large that Pillow suspects an attack.
    """
    with opened_image(path) as opened:
        image = _eight_bits(ImageOps.exif_transpose(opened)).convert("RGB")
    return _tensor(image)


def read_photo(path: Path, max_pixels: int) -> Tensor:
    """Reads an image file for training: as `read_image`, with what is transparent over white, and colours by
    the file's own ICC profile.

    Args:
        path: the file.
        max_pixels: larger images are refused before they are decoded.

    Raises:
        DataError: the file is not a readable image of one frame, or too large.
    """
    with opened_image(path, max_pixels) as opened:
        check_still(opened, path)
        image = _by_profile(_eight_bits(ImageOps.exif_transpose(opened)))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    return _tensor(image)


def read_anew(path: Path, start: int, size: int, as_clip: bool) -> bool | None:
    """Whether the pixels of a picture are others than in version 1 of the feature cache, by its header; None
    for an animation.

    Args:
        path: the file, or an archive.
        start: first byte of a member of the archive.
        size: number of bytes of the member; -1: all of the file.
        as_clip: whether its suffix is that of no image: FFmpeg read it, or Pillow with hidden colours shown.
    """
    with suppress(DataError), opened_image(path, span=(start, size)) as image:
        if image.format == "GIF" or (image.format in ("PNG", "AVIF") and count_frames(image) > 1):
            return None
        if not as_clip:
            return image.mode != "CMYK" and _to_srgb(image) is not None
        tiled = image.format in ("AVIF", "HEIF")
        return tiled or image.has_transparency_data or _to_srgb(image) is not None
    return False


def _by_profile(image: Image.Image) -> Image.Image:
    """The image with the colours that its ICC profile gives it, in sRGB; as it is without one."""
    transform = _to_srgb(image)
    if transform is None:
        return image
    if not image.has_transparency_data:
        return ImageCms.applyTransform(image.convert(_profiled(image)), transform) or image
    whole = image.convert("RGBA")
    converted = ImageCms.applyTransform(whole.convert(_profiled(image)), transform) or whole
    converted.putalpha(whole.getchannel("A"))
    return converted


def _profiled(image: Image.Image) -> str:
    """The mode whose colours the ICC profile of an image describes."""
    if image.mode == "CMYK":
        return "CMYK"
    return "L" if image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I") else "RGB"


def _to_srgb(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    profile = image.info.get("icc_profile")
    return _transform(profile, _profiled(image)) if isinstance(profile, bytes) and profile else None


@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From colours of a profile to sRGB; None if it changes nothing, is damaged, or is of other colours."""
    try:
        own, srgb = ImageCms.ImageCmsProfile(BytesIO(profile)), ImageCms.createProfile("sRGB")
        found = ImageCms.buildTransform(own, srgb, mode, "RGB")
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
    if mode == "CMYK":
        return found
    # Profiles of sRGB differ in their last bits: converted, such images would be others for nothing.
    shades = _PROBE.convert(mode)
    changed = ImageChops.difference(ImageCms.applyTransform(shades, found) or shades, shades.convert("RGB"))
    return found if numpy.asarray(changed).max() > _ROUNDING else None


_PROBE = Image.frombytes(
    "RGB", (729, 1), bytes(31 * (n // 9**c % 9) + 3 for n in range(729) for c in range(3))
)
_ROUNDING = 2  # levels


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
