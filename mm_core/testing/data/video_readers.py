"""The conformance kit of video readers (`mm_core.contracts.VideoReader`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import av
import torch
from torch import Tensor

from mm_core.contracts import Randomness, SupportsStream, VideoInfo, VideoReader
from mm_core.errors import DataError
from mm_core.plugin.checks.values import returned
from mm_core.testing.common import KindProbe, expect_tensor
from mm_core.testing.kit import Kit, checks_of, if_installed

_FRAMES, _HEIGHT, _WIDTH, _RATE = 20, 32, 64, 8


class ReaderProbe(KindProbe):
    """A video reader under test, with a clip of known frames.

    Frame k is a field of the level 16 + 12 k in red, green and blue, with a red and a blue corner.
    """

    @cached_property
    def clip(self) -> Path:
        """The clip: 20 frames of 64x32 pixels, 8 a second. Its name is not a plain word."""
        levels = torch.arange(16, 16 + 12 * _FRAMES, 12, dtype=torch.uint8)
        frames = levels[:, None, None, None].expand(-1, _HEIGHT, _WIDTH, 3).clone()
        frames[:, :8, :8] = torch.tensor([220, 20, 20], dtype=torch.uint8)
        frames[:, -8:, -8:] = torch.tensor([20, 20, 220], dtype=torch.uint8)
        return write_clip(self.probe.folder / "1:2 clip ü%03d.mp4", frames, _RATE)

    @if_installed()
    def read(self, seconds: Sequence[float], path: Path | None = None, reader: Any = None) -> Tensor:
        """Frames of the clip, or of another file."""
        reader = self.build() if reader is None else reader
        found: Tensor = reader.read(path or self.clip, seconds)
        return found

    @if_installed()
    def info(self, path: Path | None = None) -> VideoInfo:
        """What the reader reports about the clip, or about another file."""
        found: VideoInfo = self.build().probe(path or self.clip)
        return found

    def refuses(self, path: Path, what: str, *, times: Sequence[float] = (0.1,), header: bool = True) -> None:
        """Expects a DataError from `read`, and from `probe` if the file's header is damaged.

        Args:
            path: the file.
            what: the file in words, for the ContractError.
            times: times of the frames to read, in seconds.
            header: whether the file's header is damaged too.
        """
        accepted = "DataError: the sample is skipped, counted and listed"
        if header:
            self.expect_error(f"probe of {what}", DataError, accepted, self.info, path)
        self.expect_error(f"read of {what}", DataError, accepted, self.read, times, path)


def _times(frames: Sequence[int], at: float = 0.5) -> list[float]:
    """Times within frames: 0 is the beginning of a frame, 1 its end."""
    return [(frame + at) / _RATE for frame in frames]


def header(probe: ReaderProbe) -> None:
    """probe returns size, rate, number of frames and duration of a clip."""
    info = returned(VideoReader.probe, probe.info(), probe.build())
    near = replace(info, fps=round(info.fps, 1), duration=round(info.duration, 1))
    wanted = VideoInfo(_WIDTH, _HEIGHT, _RATE, _FRAMES, _FRAMES / _RATE)
    probe.expect(near == wanted, f"probe returned {info}", accepted=f"{wanted}")


def frames(probe: ReaderProbe) -> None:
    """read returns uint8 [F,Y,X,3] on the CPU, in red, green and blue, upright."""
    found = probe.read(_times([3, 4]))
    expect_tensor(probe, "read", found, torch.uint8, 2, _HEIGHT, _WIDTH, 3)
    corners = {"top left": (found[0, 2:6, 2:6], 0), "bottom right": (found[0, -6:-2, -6:-2], 2)}
    for name, (corner, strong) in corners.items():
        mean = corner.float().mean((0, 1))
        probe.expect(
            int(mean.argmax()) == strong and float(mean.max() - mean.min()) > 100,
            f"the {name} corner is read as {mean.int().tolist()}, but it is {('red', '', 'blue')[strong]}",
            accepted="colours as (red, green, blue), the first row at the top",
        )


def times(probe: ReaderProbe) -> None:
    """read returns the frames shown at the given times, in any order, and also twice."""
    for order in ([0], [19], [5, 6, 7], [17, 2, 9, 2], list(range(_FRAMES))):
        for at in (0.1, 0.5, 0.9):
            found = _numbers(probe.read(_times(order, at)))
            probe.expect(
                found == order,
                f"at {at} of their duration, frames {order} are read as {found}",
                accepted="for each time the frame shown then, in the order of `seconds`",
                hint="take the last frame that begins at or before the time",
            )


def streamed(probe: ReaderProbe) -> None:
    """stream, where there is one, gives what probe and read return, frame by frame, also in another order."""
    reader = probe.build()
    probe.require(reader, SupportsStream)
    for frames in ([3, 4, 5], [9, 2, 9], [12, 15]):
        choose = Mock(return_value=_times(frames))
        with if_installed():
            found = dict(reader.stream(probe.clip, choose))
        described = choose.call_args_list == [call(probe.info())]
        probe.expect(described, "stream describes the clip as probe does not")
        wanted = dict(enumerate(probe.read(_times(frames))))
        same = found.keys() == wanted.keys() and all(torch.equal(found[at], wanted[at]) for at in wanted)
        probe.expect(same, f"stream gives other frames than read for the frames {frames}")


def same_reader(probe: ReaderProbe) -> None:
    """A reader reads any number of files: what it has read before changes nothing."""
    reader = probe.build()
    first = probe.read(_times([12]), reader=reader)
    other = probe.clip.with_name("other.mp4")
    write_clip(other, torch.full((4, 16, _WIDTH, 3), 200, dtype=torch.uint8), 4)
    found = probe.read([0.1], other, reader)
    probe.expect(found.shape == (1, 16, _WIDTH, 3), f"a second file is read as {list(found.shape)}")
    again = probe.read(_times([12]), reader=reader)
    probe.expect(torch.equal(first, again), "the same frame is read differently after another file")


def beyond_the_end(probe: ReaderProbe) -> None:
    """A time after the last frame is a DataError: no frame is shown then."""
    # A header may state a wrong length: repeating the last frame would hide it.
    times = [0.1, (_FRAMES + 4) / _RATE]
    what = f"a clip that ends at {_FRAMES / _RATE} s, at {times[-1]} s,"
    probe.refuses(probe.clip, what, times=times, header=False)


def missing_file(probe: ReaderProbe) -> None:
    """A file that does not exist, and a folder, are a DataError."""
    probe.refuses(probe.clip.with_name("absent.mp4"), "a file that does not exist")
    probe.refuses(probe.clip.parent, "a folder")


def no_video(probe: ReaderProbe) -> None:
    """An empty file, a text and half a video are a DataError."""
    content = probe.clip.read_bytes()
    cases = {"an empty file": b"", "a text": b"no video\n" * 40, "half a video": content[: len(content) // 2]}
    for what, held in cases.items():
        path = probe.clip.with_name("damaged.mp4")
        path.write_bytes(held)
        probe.refuses(path, what)


def bit_rot(probe: ReaderProbe) -> None:
    """A video with a damaged frame is a DataError: the decoder's guess is not what was filmed."""
    noise = (Randomness(0).normal((8, _HEIGHT, _WIDTH, 3), "noise") * 60 + 128).clamp(0, 255).byte()
    path = write_clip(probe.clip.with_name("rotten.mp4"), noise, _RATE)
    with av.open(str(path)) as container:
        packet = list(container.demux(video=0))[4]
    content = bytearray(path.read_bytes())
    assert packet.pos is not None and packet.size > 1200
    content[packet.pos + 200 : packet.pos + 1000] = b"\xff" * 800
    path.write_bytes(content)
    probe.refuses(path, "a video with a damaged frame", times=_times(range(8)), header=False)


def picklable(probe: ReaderProbe) -> None:
    """The reader goes to data workers: it pickles, also after reading, and reads the same there."""
    reader = probe.build()
    wanted = probe.read(_times([4, 1]), reader=reader)
    again = probe.probe.in_worker("the reader", reader)
    same = torch.equal(wanted, probe.read(_times([4, 1]), reader=again))
    probe.expect(same, "the reader reads other frames after pickling")


def _numbers(found: Tensor) -> list[int]:
    """Numbers of the frames, from their colour: frames are 12 levels apart."""
    level = found[:, 12:20, 16:32].float().mean((1, 2, 3))
    return [round(number) for number in ((level - 16) / 12).tolist()]


def write_clip(path: Path, frames: Tensor, rate: int) -> Path:
    """Writes frames, uint8 [F,Y,X,3] with even sides, as an H.264 video with a keyframe every 6 frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "4"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = "yuv420p", 6
        for frame in frames.contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


KIT = Kit(checks_of(__name__), probe=ReaderProbe)
"""The conformance checks of video readers."""
