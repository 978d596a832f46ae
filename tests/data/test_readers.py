"""Video readers: the right frame for a time, and an error for every file that is none."""

from __future__ import annotations

import gc
import pickle
import struct
import sys
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch

from mm_core.builtin.configs.data import VideoTextConfig
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.package_readers import DecordReader, TorchcodecReader
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from support.readers import TORCHCODEC

READERS = [PyAVReader(), pytest.param(DecordReader(), id="decord"), TORCHCODEC]


def levels(frames: torch.Tensor) -> list[int]:
    """The numbers of the frames, as the fixture `encode` wrote them into their grey level."""
    return [round((float(frame.float().mean()) - 20) / 4) for frame in frames]


@pytest.mark.parametrize("name", ["bigbuckbunny", "bikes", "carphone_pristine", "carphone_distorted"])
def test_both_readers_see_the_same_frames_of_real_clips(clips: Path, name: str) -> None:
    file = clips / f"{name}.mp4"
    info = PyAVReader().probe(file)
    times = [(first + 0.5) / info.fps for first in (0, 1, 7, 60, 61)]
    one, other = PyAVReader().read(file, times), DecordReader().read(file, times)
    assert one.dtype == torch.uint8 and one.shape == (5, info.height, info.width, 3)
    assert (one.float() - other.float()).abs().mean() < 0.5
    assert not torch.equal(one[0], one[3])


@pytest.mark.parametrize("reader", [TORCHCODEC])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_torchcodec_returns_the_pixels_of_pyav(tmp_path: Path, encode, reader, pix_fmt: str) -> None:
    odd = (63, 47) if pix_fmt == "yuv444p" else (64, 48)
    for matrix in (1, 5):
        colour = encode(tmp_path / "a.mp4", 4, size=odd, pix_fmt=pix_fmt, matrix=matrix, field=(30, 200, 40))
        assert torch.equal(reader.read(colour, [0.0, 0.1]), PyAVReader().read(colour, [0.0, 0.1]))
    noise = encode(tmp_path / "b.mkv", 4, size=odd, pix_fmt=pix_fmt, noise=True)
    if pix_fmt != "yuv420p10le":  # where FFmpeg's versions interpolate colours differently
        assert torch.equal(reader.read(noise, [0.1]), PyAVReader().read(noise, [0.1]))


@pytest.mark.parametrize("reader", [TORCHCODEC])
def test_torchcodec_refuses_what_it_gets_wrong(tmp_path: Path, encode, reader) -> None:
    groups = {"x264-params": "open-gop=1:bframes=3:b-adapt=0"}
    files = {
        "open groups of pictures": encode(tmp_path / "a.mp4", options=groups),
        "the times in this container": encode(tmp_path / "a.ts"),
        "AV1": encode(tmp_path / "b.mp4", 8, codec="libsvtav1"),
    }
    for what, file in files.items():
        with pytest.raises(
            DataError, match=f"torchcodec cannot read the video: it gets {what} wrong"
        ) as caught:
            reader.read(file, [0.0])
        assert "core/pyav" in str(caught.value.hint)


def test_probe_returns_what_the_header_declares(clips: Path) -> None:
    info = PyAVReader().probe(clips / "bikes.mp4")  # 10 s of 25 frames a second, by ffprobe
    assert (info.width, info.height, info.num_frames) == (640, 272, 250)
    assert info.fps == 25 and info.duration == 10.0
    assert DecordReader().probe(clips / "bikes.mp4") == info


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_are_found_by_time_with_and_without_a_seek(tmp_path: Path, encode, reader, suffix) -> None:
    file = encode(tmp_path / f"a.{suffix}", options={"bf": "2"})
    assert reader.probe(file).num_frames == 40
    for wanted in ([0, 1, 2], [39, 0, 20, 20], [25, 26, 30], [11, 12, 13], [36], [39]):
        assert levels(reader.read(file, [(k + 0.5) / 24 for k in wanted])) == wanted
    assert levels(reader.read(file, [0.0, 1 / 24, 30 / 24])) == [0, 1, 30], "a frame's own timestamp counts"


@pytest.mark.parametrize("reader", READERS)
def test_variable_frame_rates_go_by_timestamps(tmp_path: Path, encode, reader) -> None:
    # Ten frames at 24 a second, then ten at 6: the average rate would be wrong everywhere.
    ticks = [25 * k for k in range(10)] + [250 + 100 * k for k in range(10)]
    file = encode(tmp_path / "vfr.mp4", ticks=ticks)
    times = [tick / 600 + 0.01 for tick in ticks]
    assert levels(reader.read(file, times)) == list(range(20))
    between = [(250 + 100 * 3 + 60) / 600]  # frame 13 is still shown
    assert levels(reader.read(file, between)) == [13]


def test_frames_are_freed_as_they_are_passed_on(tmp_path: Path, encode) -> None:
    """A frame of full HD has 3 MB: a hundred of them would wait for the garbage collector."""
    file = encode(tmp_path / "a.mp4")
    gc.collect()
    gc.disable()
    try:
        for _ in PyAVReader().stream(file, lambda info: [k / 24 for k in range(20)]):
            alive = sum(isinstance(each, av.VideoFrame) for each in gc.get_objects())
            assert alive < 10, "those that are decoded together, and that wait to be shown"
    finally:
        gc.enable()


def test_rotation_of_the_display_matrix_is_applied(tmp_path: Path, encode) -> None:
    file = encode(tmp_path / "a.mp4", 4, size=(64, 32), noise=True)
    upright = PyAVReader().read(file, [0.0])
    data = bytearray(file.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    data[matrix : matrix + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 32 * one, 0, 1 << 30)
    file.write_bytes(data)
    info = PyAVReader().probe(file)
    assert (info.width, info.height) == (32, 64)
    import decord

    readers = [PyAVReader(), DecordReader()]
    if decord.__version__ != "0.6.0":  # decord2, on aarch64
        with pytest.raises(DataError, match="decord cannot read the video"):
            readers.pop().read(file, [0.0])
    for reader in readers:
        turned = reader.read(file, [0.0])
        assert torch.equal(turned[0], torch.rot90(upright[0], -1, (0, 1))), "clockwise, as players do"


def test_frames_at_an_oblique_angle_are_refused(tmp_path: Path, encode) -> None:
    file = encode(tmp_path / "a.mp4", 4)
    data = bytearray(file.read_bytes())
    matrix, one = data.index(b"tkhd") + 4 + 40, 1 << 15
    data[matrix : matrix + 36] = struct.pack(">9i", one, one, 0, -one, one, 0, 0, 0, 1 << 30)
    file.write_bytes(data)
    for act in (lambda: PyAVReader().probe(file), lambda: PyAVReader().read(file, [0.0])):
        with pytest.raises(DataError, match="the video is shown at an oblique angle"):
            act()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("aspect", "width"), [((4, 3), 85), ((9, 16), 36), ((1280, 1281), 64)])
def test_pixels_become_square(tmp_path: Path, encode, reader, aspect: tuple[int, int], width: int) -> None:
    file = encode(tmp_path / "a.mp4", aspect=Fraction(*aspect))
    info = reader.probe(file)
    assert (info.height, info.width) == (48, width)
    frames = reader.read(file, [0.5 / 24, 30.5 / 24])
    assert frames.shape == (2, 48, width, 3) and levels(frames) == [0, 30]


def test_square_pixels_count_for_max_pixels(tmp_path: Path, encode) -> None:
    file = encode(tmp_path / "a.mp4", 3, aspect=Fraction(10))
    with pytest.raises(DataError, match="frames of 48 x 640 are larger than the reader's max_pixels"):
        PyAVReader(max_pixels=640 * 48 - 1).read(file, [0.0])


@pytest.mark.parametrize("curve", [16, 18])  # PQ, HLG
def test_transfer_curves_are_left_as_they_are(tmp_path: Path, encode, curve: int) -> None:
    plain = PyAVReader().read(encode(tmp_path / "a.mp4", 3, matrix=9), [0.0])
    assert torch.equal(PyAVReader().read(encode(tmp_path / "b.mp4", 3, matrix=9, curve=curve), [0.0]), plain)


def test_mpeg_ts_is_read_alike_alone_and_from_its_start(tmp_path: Path, encode) -> None:
    file = encode(tmp_path / "a.ts", options={"bf": "2"})
    for wanted in range(40):
        assert levels(PyAVReader().read(file, [(wanted + 0.5) / 24])) == [wanted]


def test_an_mp4_copied_from_avi_has_times_of_decoding(tmp_path: Path, encode) -> None:
    file = tmp_path / "copied.mp4"
    with av.open(str(encode(tmp_path / "a.avi", options={"bf": "2"}))) as old, av.open(str(file), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.size:
                packet.pts, packet.stream = packet.dts, stream
                new.mux(packet)
    for wanted in ([1], [30], [*range(40)]):
        assert levels(PyAVReader().read(file, [(k + 0.5) / 24 for k in wanted])) == wanted


@pytest.mark.parametrize("copied", ["avi", "mp4"])
@pytest.mark.parametrize("held", [1, 2, 5])
@pytest.mark.parametrize(
    ("codec", "options"), [("mpeg4", {"bf": "2", "b": "4000000"}), ("libx264", {"bf": "3"})]
)
def test_what_an_encoder_holds_back_does_not_repeat_the_first_frame_of_an_avi(
    tmp_path: Path, encode, codec: str, options: dict[str, str], held: int, copied: str
) -> None:
    """As XviD with B-frames is written: its packets have the times 0, 3, 4, 5, ..."""
    source, file = encode(tmp_path / "a.avi", codec=codec, options=options), tmp_path / "held.avi"
    for suffix in dict.fromkeys(("avi", copied)):
        file = tmp_path / f"held.{suffix}"
        with av.open(str(source)) as old, av.open(str(file), "w") as new:
            stream = new.add_stream_from_template(old.streams.video[0])
            step = old.streams.video[0].time_base.denominator / (
                24 * old.streams.video[0].time_base.numerator
            )
            for number, packet in enumerate(packet for packet in old.demux(video=0) if packet.size):
                moved = packet.dts + (round(held * step) if number and source.name == "a.avi" else 0)
                packet.pts = packet.dts = moved
                packet.stream = stream
                new.mux(packet)
        source = file
    reader = PyAVReader()
    info = reader.probe(file)
    assert info.num_frames == 40
    if copied == "avi":
        assert (info.fps, info.duration) == pytest.approx((24, 40 / 24), rel=1e-3)
    middles = [(k + 0.5) / 24 for k in range(40)]
    assert levels(reader.read(file, middles)) == [*range(40)]
    assert levels(reader.read(file, middles[28:31])) == [28, 29, 30]
    streamed = [levels(frame[None]) for _, frame in reader.stream(file, lambda info: middles[:12])]
    assert streamed == [[k] for k in range(12)]


@pytest.mark.parametrize("begins", ["whole", "cut"])
@pytest.mark.parametrize("options", ["open-gop=1:bframes=3:b-adapt=0", "intra-refresh=1:bframes=0"])
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "avi"])
def test_groups_of_pictures_need_not_be_closed(
    tmp_path: Path, encode, suffix: str, options: str, begins: str
) -> None:
    file = encode(tmp_path / f"a.{suffix}", options={"x264-params": options})
    first = 0
    if begins == "cut":
        whole, file = file, tmp_path / f"cut.{suffix}"
        with av.open(str(whole)) as old, av.open(str(file), "w") as new:
            stream = new.add_stream_from_template(old.streams.video[0])
            packets = [packet for packet in old.demux(video=0) if packet.size]
            packets = packets[[n for n, packet in enumerate(packets) if packet.is_keyframe][1] :]
            zero = packets[0].dts
            for packet in packets:
                packet.pts, packet.dts, packet.stream = packet.pts - zero, packet.dts - zero, stream
                new.mux(packet)
        with av.open(str(file)) as container:
            frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
            first = levels(torch.from_numpy(frame)[None])[0]
    info = PyAVReader().probe(file)
    assert info.num_frames == 40 - first and info.fps == pytest.approx(24, rel=0.005)
    for wanted in range(first, 40):
        assert levels(PyAVReader().read(file, [(wanted - first + 0.5) / 24])) == [wanted]


@pytest.mark.parametrize("reader", READERS)
def test_timestamps_that_run_backwards_are_refused(tmp_path: Path, encode, reader) -> None:
    data = encode(tmp_path / "a.ts").read_bytes()
    (tmp_path / "joined.ts").write_bytes(data + data)
    with pytest.raises(DataError, match="the timestamps of the video run backwards") as caught:
        reader.probe(tmp_path / "joined.ts")
    assert caught.value.where == str(tmp_path / "joined.ts")


def test_the_colour_matrix_that_the_file_names_is_used(tmp_path: Path, encode) -> None:
    colour = (30, 200, 40)
    for matrix in (1, 5):  # BT.709, BT.601
        file = encode(tmp_path / f"{matrix}.mp4", 3, matrix=matrix, field=colour, pix_fmt="yuv444p")
        shown = PyAVReader().read(file, [0.0])[0].float().mean((0, 1))
        assert (shown - torch.tensor(colour)).abs().max() < 4, matrix


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_video_gets_a_readable_error(tmp_path: Path, encode, encode_audio, reader) -> None:
    good = encode(tmp_path / "good.mp4", noise=True)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("this is a text " * 50)
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "cut.mp4").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    encode_audio(tmp_path / "audio.mp4")
    expected = {
        "missing.mp4": "does not exist",
        "empty.mp4": r"empty file \(0 bytes\)",
        "text.mp4": "not a readable video",
        "folder.mp4": "is a folder",
        "cut.mp4": "not a readable video",
        "audio.mp4": r"has no video stream \(it contains: audio\)",
    }
    for name, sentence in expected.items():
        with pytest.raises(DataError, match=sentence) as caught:
            reader.read(tmp_path / name, [0.0])
        assert caught.value.where == str(tmp_path / name)
        with pytest.raises(DataError, match=sentence):
            reader.probe(tmp_path / name)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_whose_header_promises_more_than_it_holds(tmp_path: Path, encode, reader) -> None:
    whole = encode(tmp_path / "a.mp4", noise=True, container_options={"movflags": "faststart"})
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert reader.probe(cut).num_frames == 40
    if isinstance(reader, PyAVReader):  # decord reads the whole file to open it
        assert torch.equal(reader.read(cut, [0.01, 0.1]), reader.read(whole, [0.01, 0.1])), (
            "what is there is read"
        )
    with pytest.raises(DataError) as caught:
        reader.read(cut, [39.5 / 24])
    assert str(cut) in str(caught.value)
    with pytest.raises(DataError, match="is needed, but the video ends at"):
        reader.read(whole, [40.2 / 24])


def test_pyav_refuses_flipped_bits(clips: Path, tmp_path: Path) -> None:
    source = (clips / "bikes.mp4").read_bytes()
    start = source.index(b"mdat") + 4
    refused = 0
    for trial in range(12):
        data = bytearray(source)
        for place in range(40):  # a sprinkling over the first part of the stream
            data[start + 2000 + (trial * 7919 + place * 1543) % 60000] ^= 0x55
        file = tmp_path / f"{trial}.mp4"
        file.write_bytes(data)
        try:
            PyAVReader().read(file, [(k + 0.5) / 25 for k in range(30)])
        except DataError as error:
            assert "damaged" in error.what or "cannot be decoded" in error.what
            assert error.where == str(file)
            refused += 1
    assert refused == 12


@pytest.mark.parametrize("kind", [PyAVReader, DecordReader])
def test_frames_that_are_too_large_are_refused_before_decoding(
    tmp_path: Path, encode, kind, monkeypatch
) -> None:
    file = encode(tmp_path / "a.mp4", 3)
    assert kind(max_pixels=64 * 48).read(file, [0.0]).shape == (1, 48, 64, 3)
    monkeypatch.setattr("mm_core.data.media.readers.timeline", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="48 x 64 are larger than the reader's max_pixels") as caught:
        kind(max_pixels=64 * 48 - 1).probe(file)
    assert caught.value.accepted == "up to 3,071 pixels a frame"


@pytest.mark.parametrize("reader", READERS)
def test_senseless_times_are_refused(clips: Path, reader) -> None:
    for times in ([], [-1.0], [float("nan")]):
        with pytest.raises(DataError, match="cannot read frames at"):
            reader.read(clips / "bikes.mp4", times)


def test_a_playlist_in_disguise_opens_no_address(tmp_path: Path) -> None:
    file = tmp_path / "list.mp4"
    file.write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataError):
        PyAVReader().probe(file)


def test_without_decord_the_error_has_a_hint(clips: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(DataError, match="decord is not installed") as caught:
        DecordReader().read(clips / "bikes.mp4", [0.0])
    assert "pyav" in str(caught.value.hint)


def test_without_torchcodec_or_its_libraries_the_error_has_a_hint(
    clips: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.delitem(sys.modules, "torchcodec.decoders", raising=False)
    with pytest.raises(DataError, match="the package torchcodec is not installed") as caught:
        TorchcodecReader().read(clips / "bikes.mp4", [0.0])
    assert "mm-core[torchcodec]" in str(caught.value.hint)
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec" / "__init__.py").write_text(
        "raise OSError('libavutil.so.60: not found. Causes:\\n  none')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchcodec")
    with pytest.raises(
        DataError, match=r"torchcodec cannot be loaded: libavutil.so.60: not found\n"
    ) as caught:
        TorchcodecReader().read(clips / "bikes.mp4", [0.0])
    assert "FFmpeg's shared libraries" in str(caught.value.hint)


def test_readers_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(PyAVReader(7))).max_pixels == 7
    assert pickle.loads(pickle.dumps(DecordReader(7))).max_pixels == 7


def test_videos_are_decoded_by_pyav_unless_decord_is_asked_for(tmp_path: Path, encode, annotate) -> None:
    """decord 0.6 decodes with an FFmpeg of 2021: docs/data.md, Readers."""
    encode(tmp_path / "a.mp4", 3)
    rows = annotate(tmp_path / "rows.json", [{"path": "a.mp4", "cap": "a"}])
    assert VideoTextConfig.reader.type == "core/pyav"
    assert isinstance(VideoTextDataset(rows, 1, 16, 16).reader, PyAVReader)
