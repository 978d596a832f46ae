"""Video readers around other packages than PyAV, which refuse what their package is known to show wrongly."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts import VideoInfo
from mm_core.data.media.geometry import UPRIGHT, Orientation, Pixels, resized, see_through
from mm_core.data.media.readers import (
    EPSILON,
    FAULTS,
    PyAVReader,
    Reader,
    absolute_name,
    checked_times,
    opened,
    too_short,
)
from mm_core.data.media.timeline import hides_alpha, open_groups
from mm_core.errors import DataError, MMError, first_line, plural


class Frames(NamedTuple):
    """The frames of a video as a package numbers them.

    Attributes:
        starts: of the frames, in seconds after the first.
        end: of the last frame, in seconds after the start of the first.
        decode: uint8 [F,Y,X,3] of the frames with the given numbers.
    """

    starts: Sequence[float]
    end: float
    decode: Callable[[Sequence[int]], Pixels]


class PackageReader(Reader):
    """Base of the readers that decode with a package other than PyAV.

    PyAV reads the header, so that all readers refuse the same files, and still pictures.
    """

    package: str

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Reads the frames of a video at given times: uint8 [F,Y,X,3] RGB, in the order of `seconds`.

        Raises:
            DataError: the package is missing, or the file cannot be read.
        """
        times = checked_times(seconds, path)
        package = self._imported()
        info, turn, hidden = self.shown_info(path)
        if info.num_frames == 1:  # the packages cannot open pictures
            return PyAVReader(self.max_pixels).read(path, times)
        try:
            if wrong := self._transparency(path) or self._wrong(path, turn, hidden):
                raise ValueError(f"it gets {wrong} wrong")
            starts, end, decode = self._frames(package, path, info)
            if len(starts) != info.num_frames:
                raise ValueError(f"it finds {plural(len(starts), 'frame')}, not {info.num_frames}")
            if end < info.duration - 1.5 / info.fps:
                raise ValueError("it gets the times in this container wrong")
            if max(times) >= end + EPSILON:
                raise too_short(path, max(times), end)
            frames = decode([bisect.bisect_right(starts, time + EPSILON) - 1 for time in times])
        except MMError:
            raise
        except (*self._faults(package), IndexError, *FAULTS) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{self.package} cannot read the video: {reason}",
                where=str(path),
                hint="use the video reader core/pyav, or encode the video again, for example as H.264 mp4",
            ) from None
        return torch.stack([torch.from_numpy(resized(frame, info.height, info.width)) for frame in frames])

    def _imported(self) -> ModuleType:
        """The package. DataError if it is missing."""
        raise NotImplementedError

    def _faults(self, package: ModuleType) -> tuple[type[Exception], ...]:
        """The package's own exceptions for files that it cannot read."""
        return ()

    def _transparency(self, path: Path) -> str:
        with opened(path, self.max_pixels) as (_, stream):
            format = stream.codec_context.format
            clear = hides_alpha(stream) or (format is not None and see_through(format, stream))
            return "transparency" if clear and stream.codec_context.name != "gif" else ""

    def _wrong(self, path: Path, turn: Orientation, hidden: bool) -> str:
        """What the package shows wrongly in a video, without a sign; empty if nothing."""
        raise NotImplementedError

    def _frames(self, package: ModuleType, path: Path, info: VideoInfo) -> Frames:
        raise NotImplementedError


class DecordReader(PackageReader):
    """Reads videos with decord 0.6 (on aarch64 decord2, of the same import name), which miss bit rot.

    Videos in which it is known to show other frames than FFmpeg are refused.
    """

    package = "decord"

    def _imported(self) -> ModuleType:
        try:
            return import_module("decord")
        except ImportError:
            raise _absent("decord", "run `pip install decord` (x86_64 Linux; aarch64: decord2)") from None

    def _faults(self, package: ModuleType) -> tuple[type[Exception], ...]:
        return (package.DECORDError,)

    def _wrong(self, path: Path, turn: Orientation, hidden: bool) -> str:
        with opened(path, self.max_pixels) as (container, stream):
            movie = container.format.name.startswith("mov,")
            if not movie and not container.format.name.startswith("matroska"):
                return "the times in this container"
            if len(container.streams.video) > 1:
                return "the choice of a video stream"
            if hidden:
                return "edit lists, which hide frames,"
            if turn.mirrored or (turn != UPRIGHT and not movie):
                return "this display matrix"
            return "open groups of pictures" if open_groups(container, stream) else ""

    def _frames(self, package: ModuleType, path: Path, info: VideoInfo) -> Frames:
        reader = package.VideoReader(absolute_name(path), ctx=package.cpu(0), num_threads=1)
        spans = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)
        last = max(float(spans[-1, 1] - spans[-1, 0]), 1.0 / info.fps)
        starts = (spans[:, 0] - spans[0, 0]).tolist()
        return Frames(starts, starts[-1] + last, lambda numbers: reader.get_batch(numbers).asnumpy())


class TorchcodecReader(PackageReader):
    """Reads videos with torchcodec and the machine's FFmpeg; it misses bit rot.

    Videos in which it is known to show other frames than PyAV are refused.
    """

    package = "torchcodec"

    def _imported(self) -> ModuleType:
        advice = "run `pip install 'mm-core[torchcodec]'`, with FFmpeg's shared libraries on the machine"
        try:
            return _loaded("torchcodec.decoders")
        except ModuleNotFoundError:
            raise _absent("torchcodec", advice) from None
        except ImportError as fault:
            raise DataError(
                f"the package torchcodec cannot be loaded: {fault}",
                accepted="`core/pyav`, which brings its own FFmpeg",
                hint="install FFmpeg's shared libraries and a release of torchcodec for this torch, or set"
                " `reader: {type: pyav}`",
            ) from None

    def _wrong(self, path: Path, turn: Orientation, hidden: bool) -> str:
        with opened(path, self.max_pixels) as (container, stream):
            if container.format.name in ("avi", "mpegts"):
                return "the times in this container"
            if hidden:
                return "edit lists, which hide frames,"
            if turn.mirrored:
                return "mirrored display matrices"
            if stream.codec_context.name in _AV1:
                return "AV1"
            # The random access points of HEVC are read correctly.
            later = stream.codec_context.name != "hevc" and open_groups(container, stream)
            return "open groups of pictures" if later else ""

    def _frames(self, package: ModuleType, path: Path, info: VideoInfo) -> Frames:
        with opened(path, self.max_pixels) as (container, stream):
            decoder = package.VideoDecoder(
                absolute_name(path), stream_index=stream.index, dimension_order="NHWC", device="cpu"
            )
            packets = (packet for packet in container.demux(stream) if packet.pts is not None)
            spans = sorted((packet.pts, packet.duration or 0) for packet in packets)
            base = float(stream.time_base)
        starts = [(ticks - spans[0][0]) * base for ticks, _ in spans]

        def decode(numbers: Sequence[int]) -> Pixels:
            found = decoder.get_frames_at(numbers)
            shown = found.pts_seconds - decoder.metadata.begin_stream_seconds
            if (shown - torch.tensor([starts[n] for n in numbers])).abs().max() > EPSILON:
                raise ValueError("it finds other frames at these times")
            pixels: Pixels = found.data.numpy()
            return pixels

        if len(decoder) != len(starts):
            raise ValueError(f"it finds {plural(len(decoder), 'frame')}, not {len(starts)}")
        return Frames(starts, starts[-1] + max(spans[-1][1] * base, 1.0 / info.fps), decode)


_AV1 = ("libdav1d", "av1", "libaom-av1")
"""PyAV's decoders of AV1; with FFmpeg 5.1, torchcodec returns some of its frames twice."""


def _loaded(name: str) -> ModuleType:
    """A module; ImportError also if a library that it needs is missing."""
    try:
        return import_module(name)
    except (OSError, RuntimeError) as fault:
        raise ImportError(first_line(fault).split(". ")[0]) from fault  # advice follows


def _absent(package: str, advice: str) -> DataError:
    return DataError(
        f"the config selects the video reader `{package}`, but the package {package} is not installed",
        accepted="`core/pyav`, which is always installed",
        hint=f"{advice}, or set `reader: {{type: pyav}}`",
    )
