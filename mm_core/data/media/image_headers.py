"""What the headers of image files show, without torch: `mm validate` reads them too."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageFile

from mm_core.data.media.limits import decoding
from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError, MMError, plural

_ORIENTATION = 0x0112  # in EXIF; from 5 on, rows are columns
# `max_pixels` decides what is too large; what Pillow takes for an attack remains an error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_AGAIN = "copy the image again, convert it to PNG or JPEG, or use another one"


def image_size(path: Path, max_pixels: int | None = None) -> tuple[int, int]:
    """(height, width) of an image file by its header, upright by its EXIF orientation.

    Args:
        path: the file.
        max_pixels: larger images are refused.

    Raises:
        DataError: the file is not a readable image, or too large.
    """
    with opened_image(path, max_pixels) as image:
        turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.width, image.height) if turned else (image.height, image.width)


def check_still(image: ImageFile.ImageFile, path: Path) -> None:
    """Refuses an animation, by DataError. Further pictures in a camera's JPEG or in a TIFF are previews or
    pages."""
    count = 1 if image.format in ("MPO", "TIFF") else getattr(image, "n_frames", 1)
    if count > 1:
        raise DataError(
            f"the {image.format} file is animated ({plural(count, 'frame')}), but is read as one picture",
            where=str(path),
            accepted="pictures of one frame; animations as GIF, APNG or videos",
            hint="convert it, for example to mp4",
        )


class TooLargeError(DataError):
    """The header of an image promises more pixels than are decoded."""


@contextmanager
def opened_image(path: Path, max_pixels: int | None = None) -> Iterator[ImageFile.ImageFile]:
    """A context with an image file opened by Pillow; only its header is read.

    Args:
        path: the file.
        max_pixels: larger images are refused; None: those that Pillow takes for an attack.

    Raises:
        TooLargeError: the image has more pixels.
        DataError: the file is not a readable image; also if decoding fails in the block.
    """
    if plain_file(path, "image", missing="there is no such image") == 0:
        raise DataError("the image is an empty file (0 bytes)", where=str(path), hint=_AGAIN)
    try:
        with decoding(str(path)), Image.open(path) as opened:
            if max_pixels is not None and opened.width * opened.height > max_pixels:
                raise _too_large(f"{opened.width}x{opened.height}", path, max_pixels)
            yield opened
    except MMError:
        raise
    except Image.DecompressionBombError as fault:
        pixels = re.search(r"\d+", str(fault))
        found = plural(int(pixels[0]), "pixel") if pixels else "too many pixels"
        raise _too_large(found, path, max_pixels) from None
    except Exception as fault:
        raise DataError(
            f"the image cannot be read: {fault}",
            where=str(path),
            hint=_AGAIN,
        ) from fault


def _too_large(found: str, path: Path, max_pixels: int | None) -> TooLargeError:
    most = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # what Pillow opens
    limit = most if max_pixels is None else min(most, max_pixels) if most else max_pixels
    mine = "the dataset's max_pixels"
    raised = ", or raise `max_pixels` of the dataset if the machine has the memory"
    return TooLargeError(
        f"the image of {found} is larger than {'Pillow opens' if limit == most else mine}",
        where=str(path),
        accepted=f"up to {plural(limit, 'pixel')}",
        hint=f"shrink the image{'' if limit == most else raised}",
    )
