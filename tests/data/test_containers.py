"""Containers, codecs, B-frames, cuts, orientations, pixel aspects and start times: all readers show the
frames and the shape that FFmpeg shows, or refuse the file."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from bisect import bisect_right
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest

from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.package_readers import DecordReader, PackageReader, TorchcodecReader
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from support.readers import torchcodec_loads

RATE, FRAMES, GROUP, HEIGHT, WIDTH = 24, 72, 24, 64, 96
UPRIGHT = (1, 0, 0, 1)
DRAWS = 200

HOLDS = {
    "mp4": {"libx264", "libx265", "mpeg4", "mpeg2video", "libvpx-vp9", "libsvtav1", "mjpeg"},
    "mov": {"libx264", "libx265", "mpeg4", "mpeg2video", "mjpeg"},
    "mkv": {"libx264", "libx265", "mpeg4", "mpeg2video", "libvpx", "libvpx-vp9", "libsvtav1", "mjpeg"},
    "webm": {"libvpx", "libvpx-vp9", "libsvtav1"},
    "ts": {"libx264", "libx265", "mpeg4", "mpeg2video"},
    "avi": {"libx264", "mpeg4", "mpeg2video", "libvpx", "libvpx-vp9", "libsvtav1", "mjpeg"},
}
TURNED = {"mp4", "mov", "mkv", "webm"}
"""Containers that hold a display matrix."""

Matrix = tuple[int, int, int, int]
"""(a, b, c, d): a stored point (x, y) is shown at (a x + c y, b x + d y)."""


class Case(NamedTuple):
    container: str
    codec: str
    reordered: bool  # B-frames; in VP8, VP9 and AV1, frames that are not shown
    cut: str  # by copying packets, as by `ffmpeg -ss 1.3 -t 1.1 -c copy`
    matrix: Matrix
    aspect: Fraction
    start: float


AXES = Case(
    tuple(HOLDS),
    tuple(sorted(set.union(*HOLDS.values()))),
    (False, True),
    ("whole", "begin", "end", "both"),
    tuple(
        (a, b, c, d)
        for a, b, c, d in itertools.product((-1, 0, 1), repeat=4)
        if abs(a) == abs(d) != abs(b) == abs(c)
    ),
    (Fraction(1), Fraction(4, 3), Fraction(9, 16)),
    (0.0, 1.5, -0.5),
)


class Shown(NamedTuple):
    """What FFmpeg shows of a file that it decodes from the begin to the end."""

    times: list[float]  # of frames, in seconds after the first
    numbers: list[int]
    matrix: Matrix
    height: int
    width: int


def drawn(rng: random.Random) -> Case:
    """A case, all of whose values are drawn."""
    while True:
        case = Case(*(rng.choice(values) for values in AXES))
        if case.codec in HOLDS[case.container]:
            return case


def pairs_of(case: Case) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def cases() -> list[Case]:
    """Cases in which each two values occur together, and 200 more."""
    rng = random.Random(40)
    missing = {
        pair
        for pair in itertools.combinations([(axis, v) for axis, values in enumerate(AXES) for v in values], 2)
        if pair[0][0] != pair[1][0] and (pair[0][0], pair[1][0]) != (0, 1)
    }
    missing |= {((0, container), (1, codec)) for container, codecs in HOLDS.items() for codec in codecs}
    chosen = []
    while missing:
        chosen.append(max((drawn(rng) for _ in range(60)), key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen + [drawn(rng) for _ in range(DRAWS)]


def pattern(number: int) -> np.ndarray:
    """bool [4,4]: the eight bits of a number, and a mark by which all orientations differ."""
    bits = [number >> bit & 1 for bit in range(8)]
    return np.array([[1, 1, 0, 0], [0, *bits[:3]], [0, *bits[3:6]], [0, *bits[6:], 0]], dtype=bool)


def turned(cells: np.ndarray, matrix: Matrix) -> np.ndarray:
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
    for matrix in AXES.matrix
}


def encoded(case: Case, path: Path) -> None:
    """Writes frames 0, 1, ... with a case's codec, times, orientation and pixel aspect."""
    options = (
        {"x265-params": f"log-level=none:bframes={2 * case.reordered}"} if case.codec == "libx265" else {}
    )
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
        if case.matrix != UPRIGHT:
            one = 1 << 16
            stream.set_display_matrix([a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30])
        for number in range(FRAMES):
            grey = np.kron(pattern(number), np.ones((HEIGHT // 4, WIDTH // 4))) * 215 + 20
            image = np.repeat(grey[..., None], 3, axis=-1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number + round(case.start * RATE), Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # SVT-AV1, as root, makes its caller a real-time process
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


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
    """The file of a case."""
    whole, path = folder / f"whole.{case.container}", folder / f"clip.{case.container}"
    encoded(case, whole)
    if case.cut == "whole":
        return whole
    begin, end = (0.0 if case.cut == "end" else 1.3), (99.0 if case.cut == "begin" else 2.4)
    cut(case, whole, path, begin, end)
    return path


def shown(case: Case, path: Path) -> Shown:
    """By FFmpeg's libraries alone."""
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
    matrix = case.matrix if case.container in TURNED else UPRIGHT
    size = HEIGHT, round(WIDTH * aspect)
    return Shown(times, numbers, matrix, *(size if matrix[0] else size[::-1]))


def verdict(reader: PyAVReader | PackageReader, path: Path, truth: Shown, rng: random.Random) -> str:
    """`right`, why it is refused, or what is wrong."""
    try:
        info = reader.probe(path)
        size = info.height, info.width, info.num_frames
        if size != (truth.height, truth.width, len(truth.numbers)) or abs(info.fps / RATE - 1) > 0.005:
            return f"{info} of {truth}"
        middles = [(slot + 0.5) / info.fps for slot in range(info.num_frames)]
        some = ([rng.choice(middles)] for _ in range(4))
        for chosen in (middles, *some, middles[-1:], middles[-9:-3] or middles):
            places = [bisect_right(truth.times, time + 1e-3) - 1 for time in chosen]
            expected = [(truth.numbers[place], truth.matrix) for place in places]
            read = reader.read(path, chosen).numpy()
            found = [KNOWN.get(cells(frame).tobytes()) for frame in read]
            if found != expected or read.shape[1:3] != (truth.height, truth.width):
                return f"{found} {read.shape} at {chosen}; expected {expected}"
    except DataError as error:
        return f"refused: {error.what}"
    return "right"


PARTS = ["a few", pytest.param("all", marks=pytest.mark.slow)]


def part_of(part: str, step: int) -> list[Case]:
    return cases() if part == "all" else cases()[::step]


@pytest.mark.parametrize("part", PARTS)
def test_all_readers_show_what_ffmpeg_shows_or_refuse_the_file(tmp_path: Path, part: str) -> None:
    rng = random.Random(0)
    readers = [PyAVReader(), DecordReader(), *([TorchcodecReader()] if torchcodec_loads() else [])]
    counts = dict.fromkeys((type(reader).__name__ for reader in readers), 0)
    wrong = []
    some = part_of(part, 12)
    for case in some:
        path = made(case, tmp_path)
        truth = shown(case, path)
        for reader in readers:
            result = verdict(reader, path, truth, rng)
            counts[type(reader).__name__] += result == "right"
            if result != "right" and " cannot read the video: " not in result:
                wrong.append((type(reader).__name__, case, result))
    assert not wrong, wrong[:3]
    assert counts["PyAVReader"] == len(some), "what is intact is not refused"
    assert min(counts.values()) >= len(some) // 25


def one(container: str, **values: object) -> Case:
    """An ordinary case but for some values."""
    return Case(container, "libx264", True, "whole", UPRIGHT, Fraction(1), 0.0)._replace(**values)


@pytest.mark.parametrize("container", ["mp4", "mov", "mkv", "ts", "avi"])
def test_a_clip_cut_by_copying_packets_trains_at_its_rate(tmp_path: Path, annotate, container: str) -> None:
    """In MP4 and MOV 8 of its frames are hidden by the edit list: 24 frames a second, not 32."""
    file = made(one(container, cut="begin"), tmp_path)
    rows = annotate(tmp_path / "rows.json", [{"path": file.name, "cap": "a"}])
    sample = VideoTextDataset(rows, 13, HEIGHT, WIDTH)[0]
    frames = sample["pixels"].permute(1, 2, 3, 0).numpy().astype("float32")
    first = 32 if container in ("mp4", "mov") else 24
    assert [KNOWN[cells(frame).tobytes()][0] for frame in frames] == [*range(first, first + 13)]
    assert sample["fps"] == 24


@pytest.mark.parametrize(("container", "frames"), [("mp4", 2), ("mkv", 2), ("mp4", 5), ("ts", 5)])
def test_a_short_clip_is_read_to_its_end(tmp_path: Path, monkeypatch, container: str, frames: int) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FRAMES", frames)
    case = one(container)
    path = made(case, tmp_path)
    assert verdict(PyAVReader(), path, shown(case, path), random.Random(0)) == "right"


@pytest.mark.parametrize("matrix", AXES.matrix)
def test_all_eight_orientations_are_upright(tmp_path: Path, matrix: Matrix) -> None:
    file = made(one("mp4", matrix=matrix), tmp_path)
    (frame,) = PyAVReader().read(file, [0.0]).numpy()
    assert KNOWN[cells(frame).tobytes()] == (0, matrix)
    if matrix[0] * matrix[3] - matrix[1] * matrix[2] < 0:
        with pytest.raises(
            DataError, match="decord cannot read the video: it gets this display matrix wrong"
        ):
            DecordReader().read(file, [0.0])


@pytest.mark.skipif(
    shutil.which("ffmpeg") is None, reason="it compares with the command ffmpeg, which no package brings"
)
@pytest.mark.parametrize("part", PARTS)
def test_the_command_ffmpeg_shows_the_same(tmp_path: Path, part: str) -> None:
    for case in part_of(part, 24):
        hides = case.container in ("mp4", "mov") and case.cut in ("begin", "both")
        if hides and case.codec in ("mjpeg", "libsvtav1"):
            continue  # FFmpeg 5.1 and its dav1d show frames that the edit list hides; FFmpeg 8 does not
        path = made(case, tmp_path)
        truth = shown(case, path)
        command = [
            "ffmpeg",
            "-v",
            "error",
            "-i",
            path,
            "-vsync",
            "passthrough",
            "-f",
            "rawvideo",
            "-pix_fmt",
            "gray",
        ]
        size = (HEIGHT, WIDTH) if truth.matrix[0] else (WIDTH, HEIGHT)  # the command stretches no pixels
        raw = subprocess.run([*command, "-"], stdout=subprocess.PIPE, check=True).stdout
        frames = np.frombuffer(raw, np.uint8).reshape(-1, *size)
        found = [KNOWN.get(cells(frame).tobytes()) for frame in frames]
        assert found == [(number, truth.matrix) for number in truth.numbers], case
