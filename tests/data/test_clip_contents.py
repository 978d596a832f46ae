"""What a clip shows: the stream of players, frames with EXIF, white behind transparency; and of one file."""

from __future__ import annotations

import io
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from PIL import Image

from mm_core.contracts import Source, VideoInfo
from mm_core.data.cache.hashes import FileHashes, Span, digest
from mm_core.data.cache.keys import digest_of
from mm_core.data.cache.rows import CacheRows, PartKey
from mm_core.data.media.package_readers import DecordReader
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from support.readers import TORCHCODEC


def two_streams(path: Path, lengths: tuple[int, int], default: int | None) -> Path:
    """Streams of 32x32 and 64x64 at 10 frames a second, of which one is the default, or none."""
    with av.open(str(path), "w") as container:
        streams = []
        for number, size in enumerate((32, 64)):
            stream = container.add_stream("libx264", rate=10)
            stream.width = stream.height = size
            stream.pix_fmt = "yuv420p"
            stream.disposition = Disposition.default if number == default else Disposition(0)
            streams.append(stream)
        for stream, length in zip(streams, lengths, strict=True):
            for _ in range(length):
                picture = np.full((stream.height, stream.width, 3), 90, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("suffix", "lengths", "default", "shown"),
    [
        ("mp4", (1, 24), 1, 64),
        ("mp4", (24, 12), 1, 64),
        ("mp4", (12, 24), 0, 32),
        ("mkv", (24, 12), 1, 64),
        ("mkv", (12, 24), None, 64),
        ("mkv", (24, 12), None, 32),
        ("ts", (12, 24), None, 64),
        ("ts", (12, 12), None, 32),
    ],
)
def test_the_default_stream_is_the_clip_or_else_the_longest(tmp_path, suffix, lengths, default, shown):
    file = two_streams(tmp_path / f"two.{suffix}", lengths, default)
    info = PyAVReader().probe(file)
    assert (info.width, info.num_frames) == (shown, lengths[shown // 64])
    assert PyAVReader().read(file, [0.0, (info.num_frames - 0.5) / 10]).shape == (2, shown, shown, 3)


@pytest.mark.parametrize("reader", [TORCHCODEC])
def test_torchcodec_reads_the_same_stream(tmp_path, reader):
    file = two_streams(tmp_path / "two.mkv", (24, 12), 1)
    assert reader.read(file, [0.0]).shape == (1, 64, 64, 3)


def test_decord_which_chooses_by_itself_refuses_several_streams(tmp_path):
    with pytest.raises(DataError, match="it gets the choice of a video stream wrong"):
        DecordReader().read(two_streams(tmp_path / "two.mp4", (24, 12), 1), [0.0])


@pytest.mark.parametrize("suffix", ["mov", "avi"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, 0), (2, 1), (3, 3), (6, 1), (5, 0)])
def test_camera_pictures_with_exif_are_a_clip(tmp_path, suffix, orientation, corner):
    """PyAV 18 has no name for this side data of a frame; the mirror is in another one beside it."""
    exif = Image.Exif()
    exif[0x0110], exif[0x0112] = "camera", orientation
    picture = Image.new("RGB", (64, 48))
    picture.paste("white", (0, 0, 32, 24))
    content = io.BytesIO()
    picture.save(content, "JPEG", exif=exif)
    file = tmp_path / f"a.{suffix}"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number in range(24):
            packet = av.Packet(content.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 24)
            packet.is_keyframe = True
            container.mux(packet)
    info = PyAVReader().probe(file)
    across = orientation > 4
    assert info == VideoInfo(48 if across else 64, 64 if across else 48, 24.0, 24, 1.0)
    frame = PyAVReader().read(file, [0.5])[0].float()
    corners = [frame[8, 8], frame[8, -8], frame[-8, 8], frame[-8, -8]]
    assert [round(float(one.mean()) / 255) for one in corners] == [int(n == corner) for n in range(4)]


ALPHA = [
    ("libvpx-vp9", "yuva420p", "webm", {}),
    ("libvpx", "yuva420p", "webm", {"auto-alt-ref": "0"}),
    ("libvpx-vp9", "yuva420p", "mkv", {}),
    ("qtrle", "argb", "mov", {}),
    ("prores_ks", "yuva444p10le", "mov", {"profile": "4"}),
    ("apng", "rgba", "png", {}),
]


def red_behind(path: Path, codec: str, pixels: str, options: dict[str, str], frames: int = 24) -> Path:
    """Red, whose left half is transparent, and whose middle is so by half from the 13th frame on."""
    with av.open(str(path), "w", format="apng" if path.suffix == ".png" else None) as container:
        stream = container.add_stream(codec, rate=10, options=options)
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        for number in range(frames):
            picture = np.full((64, 96, 4), (255, 0, 0, 255), np.uint8)
            picture[:, :32, 3] = 0
            picture[:, 32:64, 3] = 255 if number < 12 else 128
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(picture, format="rgba").reformat(format=pixels))
            )
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("codec", "pixels", "suffix", "options"), ALPHA)
def test_what_is_transparent_in_a_clip_is_over_white_as_in_pictures(tmp_path, codec, pixels, suffix, options):
    file = red_behind(tmp_path / f"a.{suffix}", codec, pixels, options)
    reader, times = PyAVReader(), [0.05, 1.65]
    assert reader.probe(file).num_frames == 24
    streamed = dict(reader.stream(file, lambda info: times))
    frames = reader.read(file, times)
    sought = reader.read(file, times[1:])  # after a seek
    assert torch.equal(frames, torch.stack([streamed[0], streamed[1]]))
    for frame, middle in (
        (frames[0], (255, 0, 0)),
        (frames[1], (255, 127, 127)),
        (sought[0], (255, 127, 127)),
    ):
        for place, colour in ((16, (255, 255, 255)), (48, middle), (80, (255, 0, 0))):
            assert (frame[32, place].int() - torch.tensor(colour)).abs().max() <= 4


@pytest.mark.parametrize("reader", [TORCHCODEC, pytest.param(DecordReader(), id="decord")])
@pytest.mark.parametrize(("codec", "pixels", "suffix", "options"), [ALPHA[0], ALPHA[3]])
def test_the_packages_refuse_transparency(tmp_path, reader, codec, pixels, suffix, options):
    file = red_behind(tmp_path / f"a.{suffix}", codec, pixels, options)
    with pytest.raises(DataError, match="it gets transparency wrong"):
        reader.read(file, [0.05])


def test_the_fourth_byte_of_raw_pixels_is_no_transparency(tmp_path):
    file = red_behind(tmp_path / "a.avi", "rawvideo", "bgra", {}, 3)
    assert PyAVReader().read(file, [0.05])[0, 32, 16].tolist() == [255, 0, 0]


PLAYLISTS = {
    "ffconcat": "ffconcat version 1.0\nfile secret.mp4\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
    '<AdaptationSet mimeType="video/mp4"><Representation id="1"><BaseURL>secret.mp4</BaseURL>'
    "</Representation></AdaptationSet></Period></MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    "ism": '<SmoothStreamingMedia MajorVersion="2"><StreamIndex Type="video" Url="secret.mp4"/>',
    "vobsub": "# VobSub index file, v7\nsize: 16x16\nid: en, index: 0\n",
}


@pytest.mark.parametrize("suffix", ["mp4", "m3u8", "txt", "sdp", "idx", "gif"])
@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_text_in_disguise_opens_no_other_file(tmp_path, encode, kind, suffix):
    encode(tmp_path / "secret.mp4", 4)
    file = tmp_path / f"clip.{suffix}"
    file.write_text(PLAYLISTS[kind])
    with pytest.raises(DataError, match="this is not a readable video"):
        PyAVReader().probe(file)


def test_a_refused_container_is_answered_with_those_that_are_read(tmp_path, encode):
    encode(tmp_path / "a.mp4", 4)
    (tmp_path / "b.mp4").write_text("ffconcat version 1.0\nfile a.mp4\n")
    with pytest.raises(DataError, match="no container that is read") as caught:
        PyAVReader().probe(tmp_path / "b.mp4")
    assert "MP4" in str(caught.value.accepted) and "FLV" in str(caught.value.accepted)


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        ("flv", "flv1"),
        ("wmv", "wmv2"),
        ("3gp", "h263"),
        ("ogv", "vp8"),
        ("mpg", "mpeg2video"),
        ("ivf", "vp8"),
    ],
)
def test_containers_of_the_page_are_read(tmp_path, suffix, codec):
    file = tmp_path / f"a.{suffix}"
    names = {"flv1": "flv", "vp8": "libvpx"}
    with av.open(str(file), "w") as container:
        stream = container.add_stream(names.get(codec, codec), rate=25)
        stream.width, stream.height, stream.pix_fmt = 176, 144, "yuv420p"
        for number in range(10):
            picture = np.full((144, 176, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    assert PyAVReader().probe(file).num_frames == 10
    levels = PyAVReader().read(file, [(k + 0.5) / 25 for k in range(10)]).float().mean((1, 2, 3))
    assert (levels - 20 * torch.arange(10)).abs().max() < 8


def keys_of(files: list[Path], known: Path) -> list[bytes]:
    """Keys of the features of clips in a cache that knows the hashes in a folder."""
    reader = {"frames": 1, "reader": {"type": "PyAVReader"}}
    rows = CacheRows(None, None, 1, 0)
    hashes = FileHashes(known)
    sources = [Source(file.name, "", reader, file) for file in files]
    found = rows.keys_of(sources, [PartKey("latents", False, bytes(16))], hashes)
    hashes.save()
    return [one.tobytes() for one in found[:, 0]]


def test_clips_that_are_read_otherwise_have_other_keys_and_all_others_keep_theirs(tmp_path, encode):
    gif, clear = tmp_path / "as_ever.gif", Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.save(gif, save_all=True, append_images=[clear])
    as_ever = [
        encode(tmp_path / "as_ever.mp4", 4),
        encode(tmp_path / "as_ever.mkv", 4),
        gif,
        two_streams(tmp_path / "first.mp4", (24, 12), 0),
    ]
    otherwise = [
        two_streams(tmp_path / "second.mp4", (1, 24), 1),
        *(red_behind(tmp_path / f"{n}.{a[2]}", a[0], a[1], a[3], 4) for n, a in enumerate(ALPHA)),
    ]
    (tmp_path / "text.mp4").write_text("ffconcat version 1.0\nfile as_ever.mp4\n")
    otherwise.append(tmp_path / "text.mp4")
    with (tmp_path / "a.tar").open("wb") as archive:
        archive.write(otherwise[0].read_bytes())
    for file in (*as_ever, *otherwise):
        os.utime(file, (1e9, 1e9))
    golden = [digest(bytes(16), digest_of({"frames": 1, "reader": {"type": "PyAVReader"}}), blake, b"()")
              for blake in (digest(file.read_bytes()) for file in (*as_ever, *otherwise))]  # fmt: skip
    found = keys_of([*as_ever, *otherwise], tmp_path / "files")
    same = [key[:16] == before for key, before in zip(found, golden, strict=True)]
    assert same == [True] * len(as_ever) + [False] * len(otherwise)
    for file in (*as_ever, *otherwise):  # a later start opens no file
        size = file.stat().st_size
        file.write_bytes(bytes(size))
        os.utime(file, (1e9, 1e9))
    assert keys_of([*as_ever, *otherwise], tmp_path / "files") == found
    member = Span(tmp_path / "a.tar", 0, (tmp_path / "a.tar").stat().st_size, clip=True)
    one, other = FileHashes(tmp_path / "none").of([member, member._replace(clip=False)])
    assert one != other
