"""Video readers: the right frame for a time, and an error for every file that is none."""

from __future__ import annotations

import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch

from mm_core.builtin.configs.data import VideoTextConfig
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.readers import DecordReader, PyAVReader
from mm_core.errors import DataError

READERS = [PyAVReader(), pytest.param(DecordReader(), id="decord")]


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
    for reader in (PyAVReader(), DecordReader()):
        turned = reader.read(file, [0.0])
        assert torch.equal(turned[0], torch.rot90(upright[0], -1, (0, 1))), "clockwise, as players do"


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
    monkeypatch.setattr("mm_core.data.media.readers._decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="64x48 are larger than the reader's max_pixels") as caught:
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


def test_readers_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(PyAVReader(7))).max_pixels == 7
    assert pickle.loads(pickle.dumps(DecordReader(7))).max_pixels == 7


def test_videos_are_decoded_by_pyav_unless_decord_is_asked_for(tmp_path: Path, encode, annotate) -> None:
    """decord 0.6 decodes with an FFmpeg of 2021: docs/data.md, Readers."""
    encode(tmp_path / "a.mp4", 3)
    rows = annotate(tmp_path / "rows.json", [{"path": "a.mp4", "cap": "a"}])
    assert VideoTextConfig.reader.type == "core/pyav"
    assert isinstance(VideoTextDataset(rows, 1, 16, 16).reader, PyAVReader)
