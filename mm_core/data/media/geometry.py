"""How the frames of a video are shown: upright, and with square pixels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from av import VideoFrame
from av.sidedata.sidedata import SideDataContainer, Type
from av.video.reformatter import Colorspace, Interpolation, VideoReformatter

from mm_core.errors import DataError

if TYPE_CHECKING:
    from av import VideoFormat, VideoStream

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""uint8 [Y,X,3]."""

_BT709 = 1  # AVCOL_SPC_BT709, the colour space of a frame
_SQUARE = 0.01  # pixels whose sides differ by less are square: encoders round sizes
_OBLIQUE = 0.02  # about one degree, as in FFmpeg
_ONE_THREAD = {"threads": 1} if "threads" in (VideoReformatter.reformat.__doc__ or "") else {}
"""Newer versions start a thread for each core; data workers already run in parallel."""


def _unnamed(kind: type[Type], value: int) -> Type:
    """A type of side data that PyAV does not know, such as EXIF: it could not list a frame's others."""
    found: Any = object.__new__(kind)
    found._name_, found._value_ = f"TYPE_{value}", value
    return found  # type: ignore[no-any-return]


Type._missing_ = classmethod(_unnamed)  # type: ignore[assignment, method-assign]


class Orientation(NamedTuple):
    """How a stored frame becomes upright: first transposed, then with its rows or columns reversed."""

    transposed: bool
    rows: bool
    columns: bool

    @property
    def mirrored(self) -> bool:
        """Whether no turn makes the frame upright."""
        return self.transposed ^ self.rows ^ self.columns


UPRIGHT = Orientation(False, False, False)


def orientation(frame: VideoFrame, path: Path) -> Orientation:
    """The orientation in a frame's display matrix. DataError for a turn that is not a quarter of a circle."""
    # `frame.side_data` would refer to the frame that refers to it: its memory would wait for the collector.
    data = SideDataContainer(frame).get("DISPLAYMATRIX")  # type: ignore[call-arg]
    if data is None:
        return UPRIGHT
    # A stored point (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data))
    straight, across = max(abs(a), abs(d)), max(abs(b), abs(c))
    if min(straight, across) > _OBLIQUE * max(straight, across):
        raise DataError(
            "the video is shown at an oblique angle",
            where=str(path),
            accepted="videos turned by quarters of a circle, mirrored or not",
            hint="encode the video again: FFmpeg turns its frames",
        )
    return Orientation(True, b < 0, c < 0) if across > straight else Orientation(False, d < 0, a < 0)


def shown_width(stream: VideoStream) -> int:
    """Width of the stored frames in square pixels; they keep their height."""
    width, ratio = int(stream.width), float(stream.sample_aspect_ratio or 1)
    return width if ratio <= 0 or abs(ratio - 1) < _SQUARE else max(1, round(width * ratio))


def shown_size(stream: VideoStream, turn: Orientation) -> tuple[int, int]:
    """(height, width) of the frames as they are shown."""
    size = stream.height, shown_width(stream)
    return size[::-1] if turn.transposed else size


def rgb(frame: VideoFrame, stream: VideoStream, path: Path, converter: VideoReformatter) -> Pixels:
    """The frame's pixels as they are shown, converted with the frame's own colour matrix.

    Args:
        frame: as decoded.
        stream: of the frame.
        path: of the video, for errors.
        converter: one for all frames of a stream; a new one takes longer than a small frame.
    """
    turn = orientation(frame, path)
    # Some versions of the library use BT.601 by default, whatever the frame's colour space.
    matrix = Colorspace.ITU709 if frame.colorspace == _BT709 else None
    clear = see_through(frame.format, stream)
    shown = converter.reformat(
        frame, format="rgba" if clear else "rgb24", src_colorspace=matrix, **_ONE_THREAD
    )
    array: Any = shown.to_ndarray()
    if clear:
        array = _over_white(array)
    if turn.transposed:
        array = array.transpose(1, 0, 2)
    array = np.ascontiguousarray(array[:: -1 if turn.rows else 1, :: -1 if turn.columns else 1])
    return resized(array, *shown_size(stream, turn))


def see_through(pixels: VideoFormat, stream: VideoStream) -> bool:
    """Whether frames of a pixel format have transparency; the fourth byte of raw pixels means nothing."""
    if "a" not in pixels.name:  # each frame is asked, and most are yuv420p
        return False
    codec = stream.codec_context.name
    if pixels.name == "pal8":
        return codec in ("apng", "png")
    return codec != "rawvideo" and any(component.is_alpha for component in pixels.components)


def _over_white(pixels: Pixels) -> Pixels:
    """uint8 [Y,X,4], with what is transparent over white, as of pictures."""
    colours, opacity = pixels[..., :3].astype(np.uint16), pixels[..., 3:].astype(np.uint16)
    found: Pixels = ((colours * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)
    return found


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Upright pixels at the size at which they are square."""
    if pixels.shape[:2] == (height, width):
        return pixels
    frame = VideoFrame.from_ndarray(pixels, format="rgb24")
    result: Pixels = frame.to_ndarray(width=width, height=height, interpolation=Interpolation.BICUBIC)
    return result
