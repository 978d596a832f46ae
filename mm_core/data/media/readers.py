"""Video readers: the frames of a video file at given times; files may be damaged or malicious."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

import av
import torch
from av.video.reformatter import VideoReformatter
from torch import Tensor

from mm_core.builtin.configs.data import PyAVConfig
from mm_core.contracts import VideoInfo
from mm_core.data.media.geometry import (
    UPRIGHT,
    Orientation,
    orientation,
    rgb,
    shown_size,
    shown_width,
)
from mm_core.data.media.image_headers import frames_too_large, picture_size
from mm_core.data.media.images import read_photo
from mm_core.data.media.timeline import AGAIN, Replay, packets_of, peek, timed, timeline
from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError, MMError, plain_reason

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer

_SEEK_FROM = 1.0  # seconds; before this, decoding from the start costs less than a second index look-up
EPSILON = 1e-3  # seconds; times and timestamps are compared within this (Matroska rounds to it)
_BACK = (0.0, 2.0, 10.0)  # seconds before the first wanted time to which seeks go, one after another

OPTIONS = {
    "protocol_whitelist": "file",  # a playlist in disguise must not make FFmpeg open URLs
    "pattern_type": "none",  # `a%03d.jpg` is the name of one file, not a pattern
    # Containers of one file; a playlist in disguise would open others.
    "format_whitelist": "mov,mp4,matroska,webm,avi,mpeg,mpegts,flv,asf,ogg,mxf,dv,gif,apng,ivf,h264,hevc,"
    "m4v,mjpeg,mpegvideo,yuv4mpegpipe,image2,jpeg_pipe,png_pipe,webp,webp_pipe,bmp_pipe,tiff_pipe,ppm_pipe",
}
_CONTAINERS = (
    "MP4, MOV, 3GP, Matroska, WebM, AVI, MPEG-PS and -TS, FLV, WMV, Ogg, MXF, DV, IVF, bare H.264, HEVC and"
    " MPEG streams, Y4M, GIF, APNG, and still pictures"
)

_PICTURE_RATE = 25.0  # frames per second of a still picture, as in FFmpeg

FAULTS = (av.FFmpegError, OSError, ValueError, ArithmeticError, RuntimeError)
"""Exceptions that PyAV raises for damaged files: FFmpeg's errors, and those from bad numbers in a header."""


class Reader:
    """Base of the readers: all read headers through PyAV (FFmpeg), so that they refuse the same files."""

    def __init__(self, max_pixels: int = PyAVConfig.max_pixels) -> None:
        self.max_pixels = max_pixels

    def probe(self, path: Path) -> VideoInfo:
        """Reads size, frame rate and duration of a video from its header, and decodes at most one frame.

        Raises:
            DataError: the file is missing, empty or not a video, or its frames exceed `max_pixels`.
        """
        return self.shown_info(path)[0]

    def shown_info(self, path: Path) -> tuple[VideoInfo, Orientation, bool]:
        """(what `probe` returns, how its frames become upright, whether some are hidden)."""
        size = picture_size(path, self.max_pixels)
        if size is not None:
            return _of_picture(*size), UPRIGHT, False
        with opened(path, self.max_pixels) as (container, stream):
            return _described(packets_of(container, stream), container, stream, path)


class PyAVReader(Reader):
    """Reads videos with FFmpeg (PyAV), in one thread, by timestamps.

    Times count from the first frame shown; a still picture is one frame of 1/25 s. Variable frame rates are
    supported, frames are turned and mirrored by their display matrix and get square pixels, and a frame
    that the decoder flags as damaged is refused (the decoder would conceal the damage).
    """

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Reads the frames of a video at given times: uint8 [F,Y,X,3] RGB, in the order of `seconds`.

        Raises:
            DataError: `probe` refuses the file, or it is damaged or truncated.
        """
        times = checked_times(seconds, path)
        result: Tensor | None = None
        for place, frame in self._decoded(path, times):
            result = torch.empty(len(times), *frame.shape, dtype=torch.uint8) if result is None else result
            result[place] = frame
        assert result is not None
        return result

    def stream(
        self, path: Path, choose: Callable[[VideoInfo], Sequence[float]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Reads the frames of a video one by one, opening it once: (place in the times, uint8 [Y,X,3]).

        Args:
            path: the video.
            choose: the times in seconds of a video with these properties.

        Raises:
            DataError: as `probe` and `read`.
        """
        size = picture_size(path, self.max_pixels)
        if size is not None:
            times = checked_times(choose(_of_picture(*size)), path)
            yield from _at_times(path, self.max_pixels, times)
            return
        with opened(path, self.max_pixels) as (container, stream):
            replay = Replay(packets_of(container, stream))
            times = checked_times(choose(_described(replay, container, stream, path)[0]), path)
            packets = replay.rest()
            if packets is not None and (yield from _read(packets, container, stream, times, path)):
                return
        yield from self._decoded(path, times)

    def _decoded(self, path: Path, times: list[float]) -> Iterator[tuple[int, Tensor]]:
        """The frames of a video at its times, by place; a frame may come twice."""
        if picture_size(path, self.max_pixels) is not None:
            yield from _at_times(path, self.max_pixels, times)
            return
        for sought in (True, False):  # not every container can be sought back to its start
            with opened(path, self.max_pixels) as (container, stream):
                if (yield from _read(packets_of(container, stream), container, stream, times, path, sought)):
                    return


@contextmanager
def opened(path: Path, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """(container, its video stream), checked by its header before anything is decoded. DataError
    for errors in the block as well, since a damaged file may have a good header."""
    if plain_file(path, "video") == 0:
        raise DataError("the video is an empty file (0 bytes)", where=str(path), hint=AGAIN)
    try:
        container = av.open(absolute_name(path), metadata_errors="replace", options=OPTIONS)
    except FAULTS as error:
        listed = getattr(error, "errno", None) != errno.EINVAL
        raise DataError(
            f"this is not a readable video: {plain_reason(error) if listed else 'no container that is read'}",
            where=str(path),
            accepted=None if listed else _CONTAINERS,
            hint="the file may be truncated, damaged, or in a format that is not supported",
        ) from None
    try:
        with container:
            yield container, _stream(container, path, max_pixels)
    except MMError:
        raise
    except FAULTS as error:
        raise DataError(
            f"the video cannot be decoded: {plain_reason(error)}", where=str(path), hint=AGAIN
        ) from error


def absolute_name(path: Path) -> str:
    """The absolute path: FFmpeg would read `12:30.mp4` as the file 30.mp4 of a protocol 12."""
    return str(path.absolute())


def _stream(container: InputContainer, path: Path, max_pixels: int) -> VideoStream:
    """The container's `shown_stream`, ready to decode. DataError if there is none."""
    streams = streams_of(container)
    if not streams:
        kinds = sorted({s.type for s in container.streams})
        raise DataError(
            f"the file has no video stream (it contains: {', '.join(kinds) or 'nothing'})",
            where=str(path),
            hint="use a file that contains a video, or remove it from the data",
        )
    stream = shown_stream(streams)
    if stream.codec_context is None:
        raise DataError(
            "FFmpeg does not support the codec of this video",
            where=str(path),
            hint="convert the video with another program, for example to H.264 mp4",
        )
    width = max(stream.width, shown_width(stream))
    if width * stream.height > max_pixels:
        raise frames_too_large(width, stream.height, path, max_pixels)
    stream.codec_context.thread_count = 1  # data workers already run in parallel
    stream.codec_context.thread_type = "NONE"
    return stream


def streams_of(container: InputContainer) -> list[VideoStream]:
    """The video streams of a container; the cover picture of an audio file is none."""
    return [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]


def shown_stream(streams: Sequence[VideoStream]) -> VideoStream:
    """The stream that players show: the default one, else the longest."""
    if len(streams) == 1:
        return streams[0]
    usual = av.stream.Disposition.default
    return max(streams, key=lambda each: (bool(each.disposition & usual), _length(each)))


def _length(stream: VideoStream) -> float:
    """Seconds of a stream: in Matroska by a tag, since FFmpeg gives each stream the length of all."""
    if found := re.match(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", "")):
        return 3600.0 * int(found[1]) + 60 * int(found[2]) + float(found[3])
    return float((stream.duration or 0) * stream.time_base) if stream.time_base else 0.0


def _of_picture(height: int, width: int) -> VideoInfo:
    return VideoInfo(width, height, _PICTURE_RATE, 1, 1.0 / _PICTURE_RATE)


def _at_times(path: Path, max_pixels: int, times: list[float]) -> Iterator[tuple[int, Tensor]]:
    """A still picture, uint8 [Y,X,3], at each of the times."""
    if max(times) >= 1.0 / _PICTURE_RATE + EPSILON:
        raise too_short(path, max(times), 1.0 / _PICTURE_RATE)
    picture = read_photo(path, max_pixels).permute(1, 2, 0).contiguous()
    return ((place, picture) for place in range(len(times)))


def _described(
    packets: Iterable[Packet[VideoStream]], container: InputContainer, stream: VideoStream, path: Path
) -> tuple[VideoInfo, Orientation, bool]:
    frames, fps, seconds, first, hidden = timeline(packets, container, stream, path)
    if first is None or frames < 1 or seconds <= 0:
        raise DataError("the video stream contains no frames", where=str(path), hint=AGAIN)
    turn = orientation(first, path)
    height, width = shown_size(stream, turn)
    return VideoInfo(width, height, fps, frames, seconds), turn, hidden


Frames = Generator[tuple[int, Tensor], None, bool]
"""Frames uint8 [Y,X,3] with their places among the wanted times; returns whether these are all."""


def _read(
    packets: Iterator[Packet[VideoStream]],
    container: InputContainer,
    stream: VideoStream,
    times: list[float],
    path: Path,
    seeks: bool = True,
) -> Frames:
    """The frames at the times, in any order; from the first packet on, or after a seek."""
    order = sorted(range(len(times)), key=times.__getitem__)
    wanted = [times[place] for place in order]
    if seeks and wanted[0] >= _SEEK_FROM:
        frames = _from_keyframe(packets, container, stream, wanted, path)
    else:
        packets, own = peek(packets, container, stream)
        frames = _pick(timed(packets, container, path, own=own), stream, wanted, path)
    while True:
        try:
            place, frame = next(frames)
        except StopIteration as end:
            return bool(end.value)
        yield order[place], frame


def _from_keyframe(
    packets: Iterator[Packet[VideoStream]],
    container: InputContainer,
    stream: VideoStream,
    wanted: list[float],
    path: Path,
) -> Frames:
    """The wanted frames after a seek; not all if the caller must read from the start.

    A seek may end too late (in MPEG-TS, or with an index by decoding time), or on frames that refer to
    skipped ones (open groups of pictures): what is decoded decides, and a second seek goes further back.
    """
    packets, own = peek(packets, container, stream)
    if not own or stream.time_base is None:
        return False
    zero = next((ticks for ticks, _ in timed(packets, container, path)), None)
    if zero is None:
        return False
    for back in _BACK:
        target = zero + int(Fraction(wanted[0] - back) / stream.time_base)
        if target <= zero:
            break
        # If the file itself is damaged, reading from the start raises the error again.
        with suppress(*FAULTS):
            container.seek(target, stream=stream, backward=True)
            packets = dropwhile(lambda packet: not packet.is_keyframe, packets_of(container, stream))
            frames = timed(packets, container, path, seeked=True)
            if (yield from _pick(frames, stream, wanted, path, zero)):
                return True
    return False


def _pick(
    frames: Iterator[tuple[int, VideoFrame]],
    stream: VideoStream,
    wanted: list[float],
    path: Path,
    zero: int | None = None,
) -> Frames:
    """For every time (ascending), the last frame that begins at or before it. DataError if the video ends
    before the last one.

    Args:
        frames: with the ticks at which they begin.
        stream: of the frames.
        wanted: times in seconds.
        path: of the video, for errors.
        zero: ticks of the file's first frame, if `frames` begin elsewhere. It returns False if they begin
            after the first wanted time.
    """
    base, converter = stream.time_base, VideoReformatter()
    sought = zero is not None
    shown: VideoFrame | None = None
    place = 0
    begins = lasts = 0.0
    for ticks, frame in frames:
        zero = ticks if zero is None else zero
        began, begins = begins, (ticks - zero) * base.numerator / base.denominator
        lasts = begins - began
        due = place
        while due < len(wanted) and wanted[due] + EPSILON < begins:
            due += 1
        if due > place:
            if shown is None:
                return False
            yield from _repeated(range(place, due), shown, stream, path, converter)
            place = due
        if place == len(wanted):
            return True
        shown = frame
    if shown is None:
        if sought:
            return False
        raise DataError("no frame of the video can be decoded", where=str(path), hint=AGAIN)
    # The last frame is shown for its own duration; later times are an error.
    lasts = max(lasts, float((shown.duration or 0) * base), 1.0 / float(stream.average_rate or 1))
    if wanted[-1] >= begins + lasts + EPSILON:
        raise too_short(path, wanted[-1], begins + lasts)
    yield from _repeated(range(place, len(wanted)), shown, stream, path, converter)
    return True


def _repeated(
    places: Iterable[int], frame: VideoFrame, stream: VideoStream, path: Path, converter: VideoReformatter
) -> Iterator[tuple[int, Tensor]]:
    pixels = torch.from_numpy(rgb(frame, stream, path, converter))
    for place in places:
        yield place, pixels


def checked_times(seconds: Sequence[float], path: Path) -> list[float]:
    times = [float(time) for time in seconds]
    if not times or not all(0 <= time < float("inf") for time in times):
        raise DataError(
            f"cannot read frames at {times[:4]} s", where=str(path), accepted="times from 0 on, at least one"
        )
    return times


def too_short(path: Path, time: float, end: float) -> DataError:
    return DataError(
        f"a frame at {time:.3f} s is needed, but the video ends at {end:.3f} s",
        where=str(path),
        hint="the file may be truncated, or its header may state a wrong length",
    )
