"""When the frames of a video are shown, whatever times its container stores."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Iterator
from itertools import chain, dropwhile, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from av import VideoCodecContext

from mm_core.errors import DataError

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer

AGAIN = "copy the file again, encode the video again, or remove it from the data"
"""Hint for a file that is probably damaged."""

_PEEKED = 32  # packets; where a decoder changes the order of frames at all, it does so earlier
_HELD = 16  # frames that an encoder may hold back to change their order; H.264 allows no more
_EVEN = 0.9  # share of the gaps between frames that are equal in a video of one rate, cut or not


class Timeline(NamedTuple):
    """The frames that are shown: how many, per second, and for how long; whether others are hidden."""

    frames: int
    fps: float
    seconds: float
    first: VideoFrame | None
    hidden: bool


class _Decoded:
    """A packet that decodes once: decoders go forward only.

    Args:
        packet: of a stream.
        decoder: instead of the stream's.
    """

    def __init__(self, packet: Packet[VideoStream], decoder: VideoCodecContext | None = None) -> None:
        self._packet, self._decoder = packet, decoder
        self._frames: list[VideoFrame] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)

    def decode(self) -> list[VideoFrame]:
        if self._frames is None:
            packet, decoder = self._packet, self._decoder
            self._frames = packet.decode() if decoder is None else decoder.decode(packet)
        return self._frames


_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""The decoders that show the transparency of WebM, which FFmpeg's own ones leave out."""


def hides_alpha(stream: VideoStream) -> bool:
    """Whether the stream has a transparency that its own decoder leaves out."""
    return stream.metadata.get("alpha_mode") == "1" and stream.codec_context.name in _WITH_ALPHA


def packets_of(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """The packets of a stream from where the container is, which decode with transparency."""
    if not hides_alpha(stream):
        yield from container.demux(stream)
        return
    decoder = VideoCodecContext.create(_WITH_ALPHA[stream.codec_context.name], "r")
    decoder.thread_count = 1
    for packet in container.demux(stream):
        yield cast("Packet[VideoStream]", _Decoded(packet, decoder))


class Replay:
    """The packets of a stream from its beginning, which `rest` gives again as long as few have been taken.

    Args:
        packets: of the stream.
    """

    def __init__(self, packets: Iterator[Packet[VideoStream]]) -> None:
        self._packets = packets
        self._taken: list[_Decoded] | None = []

    def __iter__(self) -> Iterator[Packet[VideoStream]]:
        for packet in self._packets:
            taken = _Decoded(packet)
            if self._taken is not None:
                self._taken = [*self._taken, taken] if len(self._taken) < _PEEKED else None
            yield cast("Packet[VideoStream]", taken)

    def rest(self) -> Iterator[Packet[VideoStream]] | None:
        """All packets from the beginning; None if more have been taken than are kept."""
        taken, self._taken = self._taken, None
        return None if taken is None else chain(cast("list[Packet[VideoStream]]", taken), self._packets)


def timeline(
    packets: Iterable[Packet[VideoStream]], container: InputContainer, stream: VideoStream, path: Path
) -> Timeline:
    """The frames shown, by the header where it is right about them, else counted over the packets.

    Args:
        packets: all of the stream.
        container: of the stream.
        stream: of the video.
        path: of the video, for errors.

    Raises:
        DataError: frames without times, or with times that run backwards.
    """
    first: VideoFrame | None = None
    spans: list[tuple[int, int]] = []
    hidden, key, decoded = False, None, 0
    # The times of AVI do not show which of its frames are decoded.
    presented = _presented(container)
    every = not presented and stream.codec_context.has_b_frames
    for packet in packets:
        ticks = _ticks(packet, presented)
        if packet.size and packet.is_discard:  # outside the edit list
            hidden = True
        elif packet.size and ticks is not None:
            spans.append((ticks, packet.duration or 0))
        if packet.is_keyframe and ticks is not None:
            if key is not None and ticks < key:
                raise _backwards(path)
            key = ticks
        if first is None or every:
            frames = list(sound(packet.decode(), stream, path))
            first, decoded = first or next(iter(frames), None), decoded + len(frames)
            begins = first is not None and not hidden and first.pts == min(spans, default=(None,))[0]
            if begins and (declared := _declared(container, stream)):
                return Timeline(*declared, first, hidden)
    begin = None if first is None else _ticks(first, presented)
    if every:
        spans = sorted(spans)[:decoded]
        held = _held(start for start, _ in spans)
        spans = [(start + held * (place == 0), lasts) for place, (start, lasts) in enumerate(spans)]
    elif begin is not None:
        # What precedes the first frame refers to frames that were cut off.
        spans = [span for span in spans if span[0] >= begin]
    if first is not None and not spans:
        raise _untimed(path)
    return Timeline(*(_measured(spans, stream) if spans else (0, 0.0, 0.0)), first, hidden)


def _declared(container: InputContainer, stream: VideoStream) -> tuple[int, float, float] | None:
    """(frames, fps, seconds) of MP4 and MOV, whose header lists all frames. None if it lists frames that are
    not shown: the rate is that of all."""
    if not container.format.name.startswith("mov,") or not (stream.duration and stream.average_rate):
        return None
    seconds, rate = float(stream.duration * stream.time_base), float(stream.average_rate)
    return (stream.frames, rate, seconds) if abs(rate * seconds - stream.frames) < 0.5 else None


def _measured(spans: list[tuple[int, int]], stream: VideoStream) -> tuple[int, float, float]:
    """(frames, fps, seconds) from the (start, duration) of each frame in ticks."""
    starts = sorted(start for start, _ in spans)
    gaps = [later - sooner for sooner, later in pairwise(starts)]
    usual = statistics.median(gaps) if gaps else 0
    base = float(stream.time_base)
    declared = float(stream.average_rate or 0)
    # Containers round times, and durations may be missing.
    ticks = starts[-1] - starts[0] + max(max(spans)[1], usual)
    seconds = ticks * base or (1 / declared if declared else 0.0)
    fps = len(starts) / seconds if seconds else 0.0
    even = [gap for gap in gaps if abs(gap - usual) <= usual / 4]
    if gaps and sum(even) and len(even) >= _EVEN * len(gaps):  # a hole between frames does not slow them down
        fps = len(even) / (sum(even) * base)
    # The declared rate is not rounded, but in some containers it is a guess from the first packets.
    fits = declared > 0 and fps > 0 and abs(declared / fps - 1) * len(starts) < 1
    return len(starts), declared if fits else fps, seconds


def peek(
    packets: Iterator[Packet[VideoStream]], container: InputContainer, stream: VideoStream
) -> tuple[Iterator[Packet[VideoStream]], bool]:
    """All packets, and whether frames may be trusted to have their own times.

    AVI has only times of decoding, and so has an MP4 copied from it: they ascend although the decoder changes
    the order of the frames. Elsewhere frames are shown later than they are decoded.
    """
    head: list[Packet[VideoStream]] = []
    own = False
    for packet in packets:
        head.append(packet)
        if not packet.size and packet.dts is None:  # the end
            break
        times = [each.pts for each in head if each.pts is not None]
        later = packet.pts is not None and packet.dts is not None and packet.pts != packet.dts
        own = not stream.codec_context.has_b_frames or (
            _presented(container) and (later or (packet.pts is not None and packet.pts < max(times)))
        )
        if own or not _presented(container) or len(head) == _PEEKED:
            break
    alone = all(packet.is_keyframe for packet in head if packet.size)
    return chain(head, packets), own or (_presented(container) and alone)


def _held(ticks: Iterable[int]) -> int:
    """By how much the first time of decoding is too early: an encoder that holds frames back to change their
    order writes the first one at once, and AVI has a gap behind it."""
    first, second, third = [*islice(ticks, 3), 0, 0, 0][:3]
    gap = second - first - (third - second)
    return gap if 0 < gap <= _HELD * (third - second) else 0


def open_groups(container: InputContainer, stream: VideoStream) -> bool:
    """Whether frames that follow a keyframe are shown before it: they refer to what precedes it."""
    key: int | None = None
    for packet in container.demux(stream):
        if packet.is_keyframe:
            key = packet.pts
        elif key is not None and packet.pts is not None and packet.pts < key:
            return True
    return False


def timed(
    packets: Iterable[Packet[VideoStream]],
    container: InputContainer,
    path: Path,
    *,
    own: bool = True,
    seeked: bool = False,
) -> Iterator[tuple[int, VideoFrame]]:
    """Decoded frames with the ticks at which they are shown.

    Args:
        packets: of the video stream.
        container: of the packets.
        path: of the video, for errors.
        own: whether frames have their own times; else the n-th frame of the file has its n-th time.
        seeked: frames that refer to what precedes the first packet are left out.

    Raises:
        DataError: a frame is damaged, or has no time, or one before the last frame's.
    """
    presented = _presented(container)
    waiting: list[int] = []
    held = 0
    if not own:
        packets = iter(packets)
        head = list(islice(packets, _PEEKED))
        held = _held(sorted(t for p in head if p.size and (t := _ticks(p, presented)) is not None))
        packets = chain(head, packets)
    before: int | None = None
    for packet in packets:
        ticks = _ticks(packet, presented)
        if ticks is not None and packet.size and not packet.is_discard:
            heapq.heappush(waiting, ticks)
        for frame in sound(packet.decode(), packet.stream, path, seeked=seeked and before is None):
            ticks = _ticks(frame, presented) if own else heapq.heappop(waiting) if waiting else None
            if ticks is not None and before is None:
                ticks += held
            if ticks is None:
                raise _untimed(path)
            if before is not None and ticks < before:
                raise _backwards(path)
            before = ticks
            yield ticks, frame


def sound(
    frames: Iterable[VideoFrame], stream: VideoStream, path: Path, *, seeked: bool = False
) -> Iterator[VideoFrame]:
    """Passes frames on. DataError at a frame of a different size, and at one that the decoder flags as
    damaged (`seeked`: those before the first sound one are left out)."""
    if seeked:
        frames = dropwhile(lambda frame: frame.is_corrupt, frames)
    for frame in frames:
        if frame.is_corrupt:
            raise DataError(f"the video is damaged at {frame.time or 0:.2f} s", where=str(path), hint=AGAIN)
        if (frame.width, frame.height) != (stream.codec_context.width, stream.codec_context.height):
            raise DataError(
                "the frame size changes within the video",
                where=str(path),
                hint="encode the video again with one frame size, or remove it from the data",
            )
        yield frame


def _presented(container: InputContainer) -> bool:
    """Whether the container has times of presentation."""
    name: str = container.format.name
    return name != "avi"


def _ticks(of: Packet[VideoStream] | VideoFrame, presented: bool) -> int | None:
    ticks: int | None = of.pts if presented else of.dts
    return ticks


def _untimed(path: Path) -> DataError:
    return DataError(
        "a frame of the video has no timestamp",
        where=str(path),
        hint="encode the video again, for example as H.264 mp4",
    )


def _backwards(path: Path) -> DataError:
    return DataError(
        "the timestamps of the video run backwards: it may be joined from several files",
        where=str(path),
        hint="encode the video again, for example as H.264 mp4",
    )
