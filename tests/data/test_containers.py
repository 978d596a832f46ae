"""Both readers over containers, codecs, B-frames, cuts, start times, orientations and pixel aspects: the frames and the
shape that FFmpeg shows, or a refusal. tests/README.md says which part runs when."""

from __future__ import annotations

import itertools
import random
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest

from mm_core.data.media.readers import DecordReader, PyAVReader
from mm_core.errors import DataError

RATE, FRAMES, GROUP, HEIGHT, WIDTH = 24, 72, 24, 64, 96
ONE = 1 << 16

AXES = {
    "container": ("mp4", "mov", "mkv", "webm", "ts", "avi"),
    "codec": ("libx264", "libx265", "mpeg4", "mpeg2video", "libvpx", "libvpx-vp9", "libsvtav1", "mjpeg"),
    "reordered": (False, True),  # B-frames; in VP8, VP9 and AV1, frames that are not shown
    "cut": ("whole", "begin", "end", "both"),  # by copying packets, as `ffmpeg -ss 1.3 -t 1.1 -c copy`
    # (a, b, c, d): a stored point (x, y) is shown at (a x + c y, b x + d y)
    "matrix": tuple(
        (a, b, c, d)
        for a, b, c, d in itertools.product((-1, 0, 1), repeat=4)
        if abs(a) == abs(d) != abs(b) == abs(c)
    ),
    "aspect": (Fraction(1), Fraction(4, 3), Fraction(9, 16)),
    "start": (0.0, 1.5, -0.5),
}


class Case(NamedTuple):
    container: str
    codec: str
    reordered: bool
    cut: str
    matrix: tuple[int, int, int, int]
    aspect: Fraction
    start: float


class Shown(NamedTuple):
    """What FFmpeg shows of a file, decoded from its begin to its end."""

    times: list[float]  # of frames, in seconds after the first
    numbers: list[int]
    matrix: tuple[int, int, int, int]
    height: int
    width: int


def pattern(number: int) -> np.ndarray:
    """bool [4,4]: the eight bits of a number, and a mark by which all orientations differ."""
    bits = [number >> bit & 1 for bit in range(8)]
    return np.array([[1, 1, 0, 0], [0, *bits[:3]], [0, *bits[3:6]], [0, *bits[6:], 0]], dtype=bool)


def turned(cells: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """Cells [Y,X,...] as a display matrix shows them, moved one by one."""
    a, b, c, d = matrix
    rows, columns = cells.shape[:2]
    places = {(b * x + d * y, a * x + c * y): cells[y, x] for y in range(rows) for x in range(columns)}
    ys, xs = (sorted({place[axis] for place in places}) for axis in (0, 1))
    return np.array([[places[y, x] for x in xs] for y in ys])


def cells(frame: np.ndarray) -> np.ndarray:
    """bool [4,4] of an image of a pattern."""
    grey = frame.mean(-1) if frame.ndim == 3 else frame
    rows = (np.array_split(band, 4, axis=1) for band in np.array_split(grey, 4))
    return np.array([[cell.mean() > 127 for cell in row] for row in rows])


KNOWN = {
    turned(pattern(number), matrix).tobytes(): (number, matrix)
    for number in range(FRAMES)
    for matrix in AXES["matrix"]
}


def encoded(case: Case, path: Path) -> None:
    """Writes frames 0, 1, ... with a case's codec, times, orientation and pixel aspect."""
    options = {"x265-params": f"log-level=none:bframes={2 * case.reordered}"} if case.codec == "libx265" else {}
    if case.codec.startswith("libvpx"):
        options = {"lag-in-frames": "16", "auto-alt-ref": "1"} if case.reordered else {"lag-in-frames": "0"}
        options |= {"deadline": "realtime", "cpu-used": "8"}
    if case.codec == "libsvtav1":
        options = {"preset": "12", "svtav1-params": f"pred-struct={1 + case.reordered}"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(case.codec, rate=RATE, options=options)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "yuvj420p" if case.codec == "mjpeg" else "yuv420p"
        context = stream.codec_context
        context.gop_size, context.sample_aspect_ratio = GROUP, case.aspect
        if case.codec != "libsvtav1":
            context.bit_rate = 2_000_000
        if case.codec in ("libx264", "mpeg4", "mpeg2video"):
            context.max_b_frames = 2 * case.reordered
        a, b, c, d = case.matrix
        if case.matrix != (1, 0, 0, 1):
            stream.set_display_matrix([a * ONE, b * ONE, 0, c * ONE, d * ONE, 0, 0, 0, 1 << 30])
        for number in range(FRAMES):
            grey = np.kron(pattern(number), np.ones((HEIGHT // 4, WIDTH // 4))) * 215 + 20
            image = np.repeat(grey[..., None], 3, axis=-1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number + round(case.start * RATE), Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def cut(case: Case, source: Path, path: Path, begin: float, end: float) -> None:
    """Copies the packets from the keyframe before `begin` on, until `end`; times count from `begin`."""
    with av.open(str(source)) as whole, av.open(str(path), "w") as container:
        old = whole.streams.video[0]
        new = container.add_stream_from_template(old, opaque=case.codec == "libsvtav1")
        packets = [packet for packet in whole.demux(old) if packet.dts is not None or packet.pts is not None]
        zero = int(begin / old.time_base) + min(p.pts for p in packets if p.pts is not None)
        keys = [n for n, p in enumerate(packets) if p.is_keyframe and p.pts is not None and p.pts <= zero]
        for packet in packets[keys[-1] :]:
            if packet.dts is not None and packet.dts >= zero + (end - begin) / old.time_base:
                break
            packet.pts = None if packet.pts is None else packet.pts - zero
            packet.dts = None if packet.dts is None else packet.dts - zero
            packet.stream = new
            container.mux(packet)


def made(case: Case, folder: Path) -> Path:
    """The file of a case. ValueError or FFmpegError if its container does not hold its codec."""
    whole, path = folder / f"whole.{case.container}", folder / f"clip.{case.container}"
    encoded(case, whole)
    with av.open(str(whole)) as container:
        if not container.streams.video:
            raise ValueError("MPEG-TS has no name for this codec")
    if case.cut == "whole":
        return whole
    begin, end = (0.0 if case.cut == "end" else 1.3), (99.0 if case.cut == "begin" else 2.4)
    cut(case, whole, path, begin, end)
    return path


def shown(case: Case, path: Path) -> Shown:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        base, aspect = stream.time_base, stream.sample_aspect_ratio or 1
        stored = [packet.dts for packet in container.demux(stream) if packet.size]
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    # AVI has times of decoding alone.
    ticks = stored if case.container == "avi" else [frame.pts for frame in frames]
    times = [float((tick - ticks[0]) * base) for tick in ticks]
    numbers = [KNOWN[cells(frame.to_ndarray(format="rgb24")).tobytes()][0] for frame in frames]
    matrix = case.matrix if case.container in ("mp4", "mov", "mkv", "webm") else (1, 0, 0, 1)
    size = HEIGHT, round(WIDTH * aspect)
    return Shown(times, numbers, matrix, *(size if matrix[0] else size[::-1]))


def verdict(reader: PyAVReader | DecordReader, path: Path, truth: Shown, rng: random.Random) -> str:
    """`refused`, `right`, or what is wrong."""
    try:
        info = reader.probe(path)
        size = info.height, info.width, info.num_frames
        if size != (truth.height, truth.width, len(truth.numbers)) or abs(info.fps / RATE - 1) > 0.005:
            return f"{info} of {truth}"
        middles = [(slot + 0.5) / info.fps for slot in range(info.num_frames)]
        for chosen in ([*middles], *([rng.choice(middles)] for _ in range(4)), middles[-1:], middles[-9:-3]):
            places = [bisect_right(truth.times, time + 1e-3) - 1 for time in chosen]
            expected = [(truth.numbers[place], truth.matrix) for place in places]
            read = reader.read(path, chosen).numpy()
            found = [KNOWN.get(cells(frame).tobytes()) for frame in read]
            if found != expected or read.shape[1:3] != (truth.height, truth.width):
                return f"{found} {read.shape} at {chosen}; expected {expected} of {truth}"
    except DataError as error:
        return f"refused: {error.what}"
    return "right"
