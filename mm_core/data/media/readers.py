"""Video readers: the frames of a video file at given times; files may be damaged or malicious."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import av
import numpy as np
import torch
from av.video.reformatter import Colorspace
from PIL import UnidentifiedImageError
from torch import Tensor

from mm_core.builtin.configs.data import PyAVConfig
from mm_core.contracts import VideoInfo
from mm_core.data.media.images import opened_image, read_image
from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError, MMError, plain_reason, plural

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""uint8 [Y,X,3]."""

_SEEK_FROM = 1.0  # seconds; before this, decoding from the start costs less than a second index look-up
_EPSILON = 1e-3  # seconds; times and timestamps are compared within this (Matroska rounds to it)
_BT709 = 1  # AVCOL_SPC_BT709, the colour space of a frame

_OPTIONS = {
    "protocol_whitelist": "file",  # a playlist in disguise must not make FFmpeg open URLs
    "pattern_type": "none",  # `a%03d.jpg` is the name of one file, not a pattern
}

_PICTURE_RATE = 25.0  # frames per second of a still picture, as in FFmpeg

_AGAIN = "copy the file again, encode the video again, or remove it from the data"
"""Hint for a file that is probably damaged."""

_FAULTS = (av.FFmpegError, OSError, ValueError, ArithmeticError, RuntimeError)
"""Exceptions that PyAV raises for damaged files: FFmpeg's errors, and those from bad numbers in a header."""


class _Reader:
    """Base of the readers: all read headers through PyAV (FFmpeg), so that they refuse the same files."""

    def __init__(self, max_pixels: int = PyAVConfig.max_pixels) -> None:
        self.max_pixels = max_pixels

    def probe(self, path: Path) -> VideoInfo:
        """Reads size, frame rate and duration of a video from its header, and decodes at most one frame.

        Raises:
            DataError: the file is missing, empty or not a video, or its frames exceed `max_pixels`.
        """
        with _opened(path, self.max_pixels) as (container, stream):
            picture = _picture(container, path)
            if picture is not None:
                _, height, width, _ = picture.shape
                return VideoInfo(width, height, _PICTURE_RATE, 1, 1.0 / _PICTURE_RATE)
            if stream.frames and stream.duration:
                first = next(_decode(container, stream, path), None)
                frames, seconds = stream.frames, float(stream.duration * stream.time_base)
            else:
                first, frames, seconds = _counted(container, stream, path)
            if first is None or frames < 1 or seconds <= 0:
                raise DataError("the video stream contains no frames", where=str(path), hint=_AGAIN)
            width, height = stream.width, stream.height
            if _quarter_turns(first) % 2:
                width, height = height, width
            declared = float(stream.average_rate or 0)
            # A rate that contradicts the frame count is a guess from the first packets (in Matroska); the
            # rate of a single picture may be missing.
            fits = declared > 0 and abs(declared * seconds - frames) <= 1
            return VideoInfo(width, height, declared if fits else frames / seconds, frames, seconds)


class PyAVReader(_Reader):
    """Reads videos with FFmpeg (PyAV), in one thread, by timestamps.

    Times count from the first frame; a still picture is one frame of 1/25 s. Variable frame rates are
    supported, display rotation is applied, and a frame that the decoder flags as damaged is refused (the
    decoder would conceal the damage).
    """

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Reads the frames of a video at given times: uint8 [F,Y,X,3] RGB, in the order of `seconds`.

        Raises:
            DataError: `probe` refuses the file, or it is damaged or truncated.
        """
        times = _checked(seconds, path)
        order = sorted(range(len(times)), key=times.__getitem__)
        wanted = [times[place] for place in order]
        with _opened(path, self.max_pixels) as (container, stream):
            picture = _picture(container, path)
            if picture is not None:
                if wanted[-1] >= 1.0 / _PICTURE_RATE + _EPSILON:
                    raise _too_short(path, wanted[-1], 1.0 / _PICTURE_RATE)
                return picture.expand(len(times), -1, -1, -1).clone()
            frames = _from_keyframe(container, stream, wanted, path) if wanted[0] >= _SEEK_FROM else None
            if frames is None:
                frames = _pick(_decode(container, stream, path), stream, wanted, path, seeked=False)
        assert frames is not None
        result = torch.empty(len(times), *frames[0].shape, dtype=torch.uint8)
        for place, frame in zip(order, frames, strict=True):
            result[place] = torch.from_numpy(frame)
        return result


class DecordReader(_Reader):
    """Reads videos with decord 0.6, which misses bit rot, has no AV1, and wheels only for x86_64 Linux."""

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Reads the frames of a video at given times: uint8 [F,Y,X,3] RGB, in the order of `seconds`.

        Raises:
            DataError: decord is missing, or the file cannot be read.
        """
        times = _checked(seconds, path)
        decord = _import_decord()
        info = self.probe(path)
        if info.num_frames == 1:  # decord cannot open pictures
            return PyAVReader(self.max_pixels).read(path, times)
        try:
            reader = decord.VideoReader(_name(path), ctx=decord.cpu(0), num_threads=1)
            spans = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)
            starts = (spans[:, 0] - spans[0, 0]).tolist()
            end = starts[-1] + max(float(spans[-1, 1] - spans[-1, 0]), 1.0 / info.fps)
            if times and max(times) >= end + _EPSILON:
                raise _too_short(path, max(times), end)
            indices = [bisect.bisect_right(starts, time + _EPSILON) - 1 for time in times]
            frames = reader.get_batch(indices).asnumpy()
        except MMError:
            raise
        except (decord.DECORDError, IndexError, *_FAULTS) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise DataError(
                f"decord cannot read the video: {reason}",
                where=str(path),
                hint="use the video reader core/pyav, or encode the video again, for example as H.264 mp4",
            ) from None
        return torch.from_numpy(np.ascontiguousarray(frames))


@contextmanager
def _opened(path: Path, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """(container, its first real video stream), checked by its header before anything is decoded. DataError
    for errors in the block as well, since a damaged file may have a good header."""
    if plain_file(path, "video") == 0:
        raise DataError("the video is an empty file (0 bytes)", where=str(path), hint=_AGAIN)
    try:
        container = av.open(_name(path), metadata_errors="replace", options=_OPTIONS)
    except _FAULTS as error:
        raise DataError(
            f"this is not a readable video: {plain_reason(error)}",
            where=str(path),
            hint="the file may be truncated, damaged, or in a format that FFmpeg does not support",
        ) from None
    try:
        with container:
            yield container, _stream(container, path, max_pixels)
    except MMError:
        raise
    except _FAULTS as error:
        raise DataError(
            f"the video cannot be decoded: {plain_reason(error)}", where=str(path), hint=_AGAIN
        ) from error


def _name(path: Path) -> str:
    """The absolute path: FFmpeg would read `12:30.mp4` as the file 30.mp4 of a protocol 12."""
    return str(path.absolute())


def _stream(container: InputContainer, path: Path, max_pixels: int) -> VideoStream:
    """The container's first real video stream, ready to decode. DataError if there is none."""
    covers = av.stream.Disposition.attached_pic  # the cover picture of an audio file is not a video
    streams = [s for s in container.streams.video if not s.disposition & covers]
    if not streams:
        kinds = sorted({s.type for s in container.streams})
        raise DataError(
            f"the file has no video stream (it contains: {', '.join(kinds) or 'nothing'})",
            where=str(path),
            hint="use a file that contains a video, or remove it from the data",
        )
    stream = streams[0]
    if stream.codec_context is None:
        raise DataError(
            "FFmpeg does not support the codec of this video",
            where=str(path),
            hint="convert the video with another program, for example to H.264 mp4",
        )
    if stream.width * stream.height > max_pixels:
        raise DataError(
            f"frames of {stream.width}x{stream.height} are larger than the reader's max_pixels",
            where=str(path),
            accepted=f"up to {plural(max_pixels, 'pixel')} a frame",
            hint="raise `max_pixels` of the reader if the machine has enough memory to decode it",
        )
    stream.codec_context.thread_count = 1  # data workers already run in parallel
    stream.codec_context.thread_type = "NONE"
    return stream


def _picture(container: InputContainer, path: Path) -> Tensor | None:
    """uint8 [1,Y,X,3] of a still picture, read with Pillow like any other image: FFmpeg ignores mirrored
    orientations and fills missing parts with grey. None for videos, and for formats Pillow cannot read."""
    name = container.format.name
    if name != "image2" and not name.endswith("_pipe"):
        return None
    try:
        with opened_image(path) as image:
            # Further pictures in a camera's JPEG or in a TIFF are previews or pages.
            count = 1 if image.format in ("MPO", "TIFF") else getattr(image, "n_frames", 1)
        if count > 1:
            raise DataError(
                f"the {image.format} file is animated ({plural(count, 'frame')}), but is read as a"
                " single picture",
                where=str(path),
                accepted="pictures of one frame; animations as GIF, APNG or videos",
                hint="convert it, for example to mp4",
            )
        return read_image(path).permute(1, 2, 0)[None].contiguous()
    except DataError as fault:
        if isinstance(fault.__cause__, UnidentifiedImageError):
            return None
        raise


def _counted(
    container: InputContainer, stream: VideoStream, path: Path
) -> tuple[VideoFrame | None, int, float]:
    """(first frame, number of frames, seconds) of a stream whose header lacks them: counted over the packets,
    decoding only until the first frame, in one pass, since not every container can seek back."""
    first: VideoFrame | None = None
    spans: list[tuple[int, int]] = []
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None:
            spans.append((packet.pts, packet.duration or 0))
        if first is None:
            first = next(_sound(packet.decode(), stream, path), None)
    if not spans:
        return first, 0, 0.0
    ticks = max(pts + duration for pts, duration in spans) - min(pts for pts, _ in spans)
    if not max(spans)[1] and len(spans) > 1:
        # Packets without durations: the last frame gets the mean duration.
        ticks = ticks * len(spans) // (len(spans) - 1)
    return first, len(spans), float(ticks * stream.time_base)


def _decode(container: InputContainer, stream: VideoStream, path: Path) -> Iterator[VideoFrame]:
    """Decoded frames from the container's position on, checked by `_sound`."""
    return _sound(container.decode(stream), stream, path)


def _sound(frames: Iterable[VideoFrame], stream: VideoStream, path: Path) -> Iterator[VideoFrame]:
    """Passes frames on. DataError at a frame that the decoder flags as damaged, or of a different size."""
    for frame in frames:
        if frame.is_corrupt:
            raise DataError(f"the video is damaged at {frame.time or 0:.2f} s", where=str(path), hint=_AGAIN)
        if (frame.width, frame.height) != (stream.codec_context.width, stream.codec_context.height):
            raise DataError(
                "the frame size changes within the video",
                where=str(path),
                hint="encode the video again with one frame size, or remove it from the data",
            )
        yield frame


def _from_keyframe(
    container: InputContainer, stream: VideoStream, wanted: list[float], path: Path
) -> list[Pixels] | None:
    """The wanted frames after a seek; None, with the container back at its start, if the seek failed.

    A seek may end too late (an index by decoding time) or on frames that refer to skipped ones (open groups
    of pictures). The caller then reads from the start.
    """
    start = stream.start_time
    if start is None or stream.time_base is None:
        return None
    # If the file itself is damaged, reading from the start raises the error again.
    with suppress(*_FAULTS):
        container.seek(start + int(Fraction(wanted[0]) / stream.time_base), stream=stream, backward=True)
        frames = _pick(_decode(container, stream, path), stream, wanted, path, seeked=True)
        if frames is not None:
            return frames
    container.seek(start, stream=stream, backward=True)
    return None


def _pick(
    frames: Iterator[VideoFrame], stream: VideoStream, wanted: list[float], path: Path, *, seeked: bool
) -> list[Pixels] | None:
    """For every time (ascending), the last frame that begins at or before it.

    None if decoding began after the first wanted time; DataError if the video ends before the last one.
    """
    base = stream.time_base
    first = stream.start_time if seeked else None
    shown: VideoFrame | None = None
    pixels: Pixels | None = None
    picked: list[Pixels] = []
    for frame in frames:
        if frame.pts is None:
            raise DataError(
                "a frame of the video has no timestamp",
                where=str(path),
                hint="encode the video again, for example as H.264 mp4",
            )
        first = frame.pts if first is None else first
        begins = float((frame.pts - first) * base)
        while len(picked) < len(wanted) and wanted[len(picked)] + _EPSILON < begins:
            if shown is None:
                return None
            pixels = _rgb(shown) if pixels is None else pixels
            picked.append(pixels)
        if len(picked) == len(wanted):
            return picked
        shown, pixels = frame, None
    if shown is None:
        raise DataError("no frame of the video can be decoded", where=str(path), hint=_AGAIN)
    # The last frame is shown for its own duration; later times are an error.
    lasts = max(float((shown.duration or 0) * base), 1.0 / float(stream.average_rate or 1))
    end = float((shown.pts - first) * base) + lasts
    if wanted[-1] >= end + _EPSILON:
        raise _too_short(path, wanted[-1], end)
    pixels = _rgb(shown) if pixels is None else pixels
    return picked + [pixels] * (len(wanted) - len(picked))


def _rgb(frame: VideoFrame) -> Pixels:
    """The frame's pixels, upright, converted with the frame's own colour matrix."""
    # Some versions of the library use BT.601 by default, whatever the frame's colour space.
    matrix = Colorspace.ITU709 if frame.colorspace == _BT709 else None
    array = frame.to_ndarray(format="rgb24", src_colorspace=matrix)
    return np.ascontiguousarray(np.rot90(array, _quarter_turns(frame)))


def _quarter_turns(frame: VideoFrame) -> int:
    """Counter-clockwise quarter turns that make the frame upright."""
    turns: int = round(frame.rotation / 90)
    return turns % 4


def _checked(seconds: Sequence[float], path: Path) -> list[float]:
    times = [float(time) for time in seconds]
    if not times or not all(0 <= time < float("inf") for time in times):
        raise DataError(
            f"cannot read frames at {times[:4]} s", where=str(path), accepted="times from 0 on, at least one"
        )
    return times


def _too_short(path: Path, time: float, end: float) -> DataError:
    return DataError(
        f"a frame at {time:.3f} s is needed, but the video ends at {end:.3f} s",
        where=str(path),
        hint="the file may be truncated, or its header may state a wrong length",
    )


def _import_decord() -> ModuleType:
    try:
        return import_module("decord")
    except ImportError:
        raise DataError(
            "the config selects the video reader `decord`, but the package decord is not installed",
            accepted="`core/pyav`, which is always installed",
            hint="run `pip install decord` (x86_64 Linux), or set `reader: {type: pyav}`",
        ) from None
