"""Images and videos of conversations: their sizes from file headers, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from mm_core.contracts import VideoReader
from mm_core.data.media.frames import read_frames
from mm_core.data.media.image_headers import opened_image, upright_size
from mm_core.data.media.images import read_image
from mm_core.data.media.limits import decoding
from mm_core.errors import DataError, plural
from mm_core.tasks.conversations.rows.turns import Medium, Picture

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Shown:
    """An image or video of a conversation, as the model takes it.

    Attributes:
        kind: image or video.
        sizes: of each picture: one for an image, one for each frame that is shown of a video.
    """

    kind: Medium
    sizes: tuple[Size, ...]

    @property
    def count(self) -> int:
        """Number of its placeholders in the text."""
        return len(self.sizes)


@dataclass(frozen=True)
class MediaReader:
    """Reads the images and videos of conversations.

    Attributes:
        frames: most frames of a video, evenly spread.
        max_pixels: larger images are refused, by their header.
        reader: decoder of videos.
    """

    frames: int
    max_pixels: int
    reader: VideoReader

    def shown(self, kind: Medium, file: Picture) -> Shown:
        """The pictures that are shown of an image or video, from its file's header.

        Raises:
            DataError: the file cannot be read, or is too large.
        """
        if kind == "image":
            return Shown(kind, (image_size(file, self.max_pixels),))
        assert isinstance(file, Path)
        with decoding(str(file)):
            info = self.reader.probe(file)
        return Shown(kind, ((info.height, info.width),) * min(self.frames, info.num_frames))

    def pixels(self, file: Picture, shown: Shown) -> list[Tensor]:
        """The pictures of an image or video, uint8 [3,Y,X] each.

        Raises:
            DataError: the file cannot be read, or its header was wrong.
        """
        found = [read_image(file)] if shown.kind == "image" else self._frames(file, len(shown.sizes))
        if [tuple(each.shape[-2:]) for each in found] != [*shown.sizes]:
            raise DataError(
                f"the {shown.kind}'s size differs from the size in its header",
                where=str(file),
                hint="replace the file: it is damaged, or changed while it was read",
            )
        return found

    def _frames(self, file: Picture, count: int) -> list[Tensor]:
        """The middle frame of each of `count` equal parts of a video."""
        assert isinstance(file, Path)
        with decoding(str(file)):
            info = self.reader.probe(file)
        frames = [int((part + 0.5) * info.num_frames / count) for part in range(count)]
        clip = read_frames(self.reader, file, [(frame + 0.5) / info.fps for frame in frames])
        return [frame.permute(2, 0, 1) for frame in clip]


def pictures_of(files: Sequence[Picture], shown: Sequence[Shown], reader: MediaReader) -> list[Tensor]:
    """All pictures of a conversation, in order."""
    pairs = zip(files, shown, strict=True)
    return [picture for file, each in pairs for picture in reader.pixels(file, each)]


def image_size(path: Picture, max_pixels: int) -> Size:
    """Height and width of an upright image, from its file header alone.

    Args:
        path: the image file, or its bytes.
        max_pixels: largest accepted number of pixels.

    Raises:
        DataError: the file is not an image, or has more than `max_pixels` pixels.
    """
    try:
        with opened_image(path) as image:
            width, height = image.size
            if height * width > max_pixels:
                raise DataError(
                    f"an image of {height} x {width} exceeds max_pixels",
                    where=str(path),
                    accepted=f"up to {plural(max_pixels, 'pixel')}",
                    hint="raise max_pixels of the dataset if memory is sufficient to decode the image",
                )
            return upright_size(image)
    except DataError as fault:
        if not isinstance(fault.__cause__, Image.DecompressionBombError):
            raise
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow refuses larger images
        raise DataError(
            f"the image has more than the {plural(most, 'pixel')} that Pillow opens",
            where=str(path),
            accepted=f"up to {plural(min(max_pixels, most), 'pixel')}",
            hint="shrink the image, or remove its row: max_pixels of the dataset cannot raise this limit",
        ) from None
