"""The conformance kit of video readers (`mm_core.contracts.VideoReader`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor

from mm_core.contracts import Randomness, SupportsStream, VideoInfo
from mm_core.errors import DataError, first_line
from mm_core.testing.kit import Kit, NotApplicable, Probe, by_name

_FRAMES, _HEIGHT, _WIDTH, _RATE = 20, 32, 64, 8
_NEAR = 10
"""How far the colour of a decoded field may be off: frames are 12 levels apart."""


class ReaderProbe:
    """A video reader under test, with a clip of known frames.

    Frame k is a field of the level 16 + 12 k in red, green and blue, with a red and a blue corner.

    Args:
        probe: builds new readers.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.build = probe.build
        self.expect = probe.expect

    @cached_property
    def clip(self) -> Path:
        """The clip: 20 frames of 64x32 pixels, 8 a second. Its name is not a plain word."""
        levels = torch.arange(16, 16 + 12 * _FRAMES, 12, dtype=torch.uint8)
        frames = levels[:, None, None, None].expand(-1, _HEIGHT, _WIDTH, 3).clone()
        frames[:, :8, :8] = torch.tensor([220, 20, 20], dtype=torch.uint8)
        frames[:, -8:, -8:] = torch.tensor([20, 20, 220], dtype=torch.uint8)
        return write_clip(self.probe.folder / "1:2 clip ü%03d.mp4", frames, _RATE)

    def read(self, seconds: Sequence[float], path: Path | None = None, reader: Any = None) -> Tensor:
        """Frames of the clip, or of another file."""
        reader = self.build() if reader is None else reader
        found: Tensor = self._available(lambda: reader.read(path or self.clip, seconds))
        return found

    def info(self, path: Path | None = None) -> VideoInfo:
        """What the reader reports about the clip, or about another file."""
        found: VideoInfo = self._available(lambda: self.build().probe(path or self.clip))
        return found

    def refuses(self, path: Path, what: str, *, times: Sequence[float] = (0.1,), header: bool = True) -> None:
        """Expects a DataError from `read`, and from `probe` if the file's header is damaged.

        Args:
            path: the file.
            what: the file in words, for the ContractError.
            times: times of the frames to read, in seconds.
            header: whether the file's header is damaged too.
        """
        calls: dict[str, Callable[[], object]] = {"probe": lambda: self.info(path)} if header else {}
        calls["read"] = lambda: self.read(times, path)
        for name, call in calls.items():
            came = "no error"
            try:
                call()
            except DataError:
                continue
            except NotApplicable:
                raise
            except Exception as error:
                came = f"{type(error).__name__}: {first_line(error)}"
            self.expect(
                False,
                f"{name} of {what} raises {came}",
                accepted="DataError, so that the sample is skipped, counted and listed",
            )

    def _available(self, call: Callable[[], Any]) -> Any:
        """What a call returns. NotApplicable if it needs a package that is not installed."""
        try:
            return call()
        except DataError as error:
            if isinstance(error.__context__, ImportError):
                raise NotApplicable(error.what) from error
            raise


def _times(frames: Sequence[int], at: float = 0.5) -> list[float]:
    """Times within frames: 0 is the beginning of a frame, 1 its end."""
    return [(frame + at) / _RATE for frame in frames]


def header(probe: ReaderProbe) -> None:
    """probe returns size, rate, number of frames and duration of a clip."""
    info = probe.info()
    probe.expect(
        isinstance(info, VideoInfo), f"probe returned a {type(info).__name__}", accepted="a VideoInfo"
    )
    wanted = VideoInfo(_WIDTH, _HEIGHT, _RATE, _FRAMES, _FRAMES / _RATE)
    same = (info.width, info.height, info.num_frames) == (wanted.width, wanted.height, wanted.num_frames)
    close = abs(info.fps - wanted.fps) < 0.01 and abs(info.duration - wanted.duration) < 0.01
    probe.expect(same and close, f"probe returned {info}", accepted=f"{wanted}")


def frames(probe: ReaderProbe) -> None:
    """read returns uint8 [F,Y,X,3] on the CPU, in red, green and blue, upright."""
    found = probe.read(_times([3, 4]))
    probe.expect(
        isinstance(found, Tensor)
        and found.shape == (2, _HEIGHT, _WIDTH, 3)
        and found.dtype == torch.uint8
        and found.device.type == "cpu",
        f"read returned {list(found.shape)} of {found.dtype} on {found.device}",
        accepted=f"{[2, _HEIGHT, _WIDTH, 3]} of torch.uint8 on the CPU",
    )
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
    if not isinstance(reader, SupportsStream):
        raise NotApplicable("it has no stream: a video is opened by probe, and again by read")
    for frames in ([3, 4, 5], [9, 2, 9], [12, 15]):
        infos: list[VideoInfo] = []
        found = probe._available(partial(_streamed, reader, probe.clip, _times(frames), infos))
        probe.expect(infos == [probe.info()], "stream describes the clip as probe does not")
        wanted = dict(enumerate(probe.read(_times(frames))))
        same = found.keys() == wanted.keys() and all(torch.equal(found[at], wanted[at]) for at in wanted)
        probe.expect(same, f"stream gives other frames than read for the frames {frames}")


def _streamed(
    reader: SupportsStream, path: Path, seconds: list[float], infos: list[VideoInfo]
) -> dict[int, Tensor]:
    def choose(info: VideoInfo) -> list[float]:
        infos.append(info)
        return seconds

    return dict(reader.stream(path, choose))


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
    late = (_FRAMES + 4) / _RATE
    try:
        found = probe.read([0.1, late])
    except DataError:
        return
    probe.expect(
        False,
        f"read at {late} s returned {list(found.shape)}, but the clip ends at {_FRAMES / _RATE} s",
        accepted="DataError",
        hint="a header may state a wrong length: repeating the last frame would hide it",
    )


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
    """Numbers of the frames, from their colour; -1 for one that is none of the clip's."""
    level = found[:, 12:20, 16:32].float().mean((1, 2, 3))
    near = ((level - 16) / 12).round()
    fits = ((level - 16 - 12 * near).abs() < _NEAR / 2) & (near >= 0) & (near < _FRAMES)
    return [int(number) for number in near.where(fits, torch.tensor(-1.0))]


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


KIT = Kit(
    by_name(
        *(header, frames, times, streamed, same_reader, beyond_the_end, missing_file, no_video, bit_rot),
        picklable,
    ),
    probe=ReaderProbe,
)
"""The conformance checks of video readers."""
