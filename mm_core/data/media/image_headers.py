"""What the headers of image files show, without torch: `mm validate` reads them too."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageFile, UnidentifiedImageError, features

from mm_core.data.media.limits import decoding
from mm_core.data.media.signatures import HEAD, READ, STREAMS, format_of, is_clip, name_of
from mm_core.data.rows.paths import plain_file, refused
from mm_core.errors import DataError, MMError, plural
from mm_core.files import open_plain

_ORIENTATION = 0x0112  # in EXIF; from 5 on, rows are columns
_WIDTH, _HEIGHT = 256, 257  # tags of a TIFF
_LATE = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
"""Chunks of a PNG that may hold its orientation, behind the pixels too."""
# `max_pixels` decides what is too large; what Pillow takes for an attack remains an error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_AGAIN = "copy the image again, convert it to PNG or JPEG, or use another one"


@dataclass(frozen=True)
class InMemory:
    """The bytes of an image file that a row holds itself.

    Attributes:
        name: names the image in error messages.
        content: the bytes.
    """

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


def image_size(path: Path, max_pixels: int | None = None) -> tuple[int, int]:
    """(height, width) of an image file by its header, upright by its EXIF orientation.

    Args:
        path: the file.
        max_pixels: larger images are refused.

    Raises:
        DataError: the file is not a readable image, or too large.
    """
    with opened_image(path, max_pixels) as image:
        return upright_size(image)


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """(height, width) of an opened image once it is upright, by its header alone."""
    width, height = image.size
    if image.format == "TIFF":  # newer versions of Pillow have turned these already
        tags = image.tag_v2  # type: ignore[attr-defined]
        width, height = int(tags[_WIDTH]), int(tags[_HEIGHT])
    if image.format == "PNG" and not _oriented_late(image):
        exif = Image.Image.getexif(image)  # that of a PNG decodes all pixels to find what follows them
    else:
        exif = image.getexif()
    return (width, height) if exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) else (height, width)


def _oriented_late(image: ImageFile.ImageFile) -> bool:
    """Whether a chunk behind the pixels of a PNG may hold its orientation."""
    file, pixels = image.fp, False
    if file is None or "exif" in image.info:
        return False
    place = file.tell()
    file.seek(8)
    try:
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if pixels and kind in _LATE:
                return True
            pixels = pixels or kind == b"IDAT"
            file.seek(length + 4, 1)
    finally:
        file.seek(place)
    return False


def check_still(image: ImageFile.ImageFile, path: Path) -> None:
    """Refuses an animation, by DataError (a GIF by NoImageError: it is a clip)."""
    count = count_frames(image)
    if count > 1:
        raise (NoImageError if image.format == "GIF" else DataError)(
            f"the {image.format} file is animated ({plural(count, 'frame')}), but is read as one picture",
            where=str(path),
            accepted="pictures of one frame; animations as GIF, APNG or videos",
            hint="convert it, for example to mp4",
        )


def count_frames(image: ImageFile.ImageFile) -> int:
    """Frames of an animation; 1 for a picture with previews, others of a burst, or pages."""
    return 1 if image.format in ("MPO", "TIFF", "HEIF") else getattr(image, "n_frames", 1)


class TooLargeError(DataError):
    """The header of an image promises more pixels than are decoded."""


class NoImageError(DataError):
    """The first bytes of a file are those of no image that is read; they may be those of a clip."""


def holds_clip(path: Path, span: tuple[int, int] = (0, -1)) -> bool:
    """Whether the file of an image, or a member of an archive, is a clip; one that cannot be read is none."""
    with suppress(DataError, OSError, ValueError):
        head = first_bytes(path, span[0])
        if format_of(head) != "GIF":
            return is_clip(head)
        with opened_image(path, span=span) as image:
            return count_frames(image) > 1
    return False


def first_bytes(path: Path, start: int = 0) -> bytes:
    """The bytes that show what a file is, or an archive's member at `start`; errors are of `open_plain`."""
    with open_plain(path) as file:
        file.seek(start)
        return file.read(HEAD)


@contextmanager
def opened_image(
    path: Path | InMemory, max_pixels: int | None = None, span: tuple[int, int] = (0, -1)
) -> Iterator[ImageFile.ImageFile]:
    """A context with an image file opened by Pillow in the one format that its first bytes name; only its
    header is read.

    Args:
        path: the file, or its bytes.
        max_pixels: larger images are refused; None: those that Pillow takes for an attack.
        span: first byte and number of bytes of a member of an archive; -1: all of the file.

    Raises:
        TooLargeError: the image has more pixels.
        NoImageError: the file is no image of a format that is read.
        DataError: the file is not a readable image; also if decoding fails in the block.
    """
    there = "there is no such image"
    if not (path.content if isinstance(path, InMemory) else plain_file(path, "image", missing=there)):
        raise DataError("the image is an empty file (0 bytes)", where=str(path), hint=_AGAIN)
    try:
        with (
            decoding(str(path)),
            open_plain(path) if isinstance(path, Path) else BytesIO(path.content) as whole,
        ):
            whole.seek(span[0])
            file = whole if span[1] < 0 else BytesIO(whole.read(span[1]))
            known = _readable(file.read(HEAD), path)
            file.seek(0)
            opened = Image.open(file, formats=[known])
            if max_pixels is not None and opened.width * opened.height > max_pixels:
                raise _too_large(f"{opened.height} x {opened.width}", path, max_pixels)
            yield opened
    except MMError:
        raise
    except Image.DecompressionBombError as fault:
        pixels = re.search(r"\d+", str(fault))
        found = plural(int(pixels[0]), "pixel") if pixels else "too many pixels"
        raise _too_large(found, path, max_pixels) from None
    except Exception as fault:
        damaged = isinstance(fault, UnidentifiedImageError)
        reason = "cannot identify image file (its header is damaged)" if damaged else fault
        raise DataError(
            f"the image cannot be read: {reason}",
            where=str(path),
            hint=_AGAIN,
        ) from fault


def frames_too_large(width: int, height: int, path: Path, max_pixels: int) -> DataError:
    return DataError(
        f"frames of {height} x {width} are larger than the reader's max_pixels",
        where=str(path),
        accepted=f"up to {plural(max_pixels, 'pixel')} a frame",
        hint="raise `max_pixels` of the reader if the machine has enough memory to decode it",
    )


def picture_size(path: Path, max_pixels: int) -> tuple[int, int] | None:
    """(height, width) of a still picture, known by its first bytes and read with Pillow like any other image:
    FFmpeg ignores mirrored orientations, fills missing parts with grey and takes the first tile of a HEIC for
    all of it. None for videos and animations that FFmpeg plays."""
    if plain_file(path, "video") == 0 or path.suffix.lower() in STREAMS:
        return None
    with refused("video", path), path.open("rb") as file:
        known = format_of(file.read(HEAD))
    if known is None or known == "GIF":
        return None
    with opened_image(path) as image:
        if known in ("PNG", "AVIF") and count_frames(image) > 1:
            return None
        check_still(image, path)
        if image.width * image.height > max_pixels:
            raise frames_too_large(image.width, image.height, path, max_pixels)
        return upright_size(image)


def _readable(head: bytes, path: Path | InMemory) -> str:
    """Pillow's name of the format of a file by its first bytes. DataError if it is not read here."""
    known = format_of(head)
    if known is None:
        what = f"cannot identify image file ({name_of(head)})"
        raise NoImageError(f"the image cannot be read: {what}", where=str(path), accepted=READ, hint=_AGAIN)
    if known == "AVIF" and not features.check("avif"):
        what = "the image is AVIF, which this installation of Pillow does not read"
        raise DataError(what, where=str(path), hint="run `pip install 'pillow>=11.3'`, or convert the image")
    if known == "HEIF":
        try:
            import pillow_heif
        except ImportError:
            raise DataError(
                "the image is HEIC, which Pillow reads with the package pillow-heif only",
                where=str(path),
                hint="run `pip install 'mm-core[heif]'`, or convert the image",
            ) from None
        pillow_heif.register_heif_opener()
    return known


def _too_large(found: str, path: Path | InMemory, max_pixels: int | None) -> TooLargeError:
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
