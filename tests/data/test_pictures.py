"""Still pictures as videos of one frame: the pixels that Pillow decodes, upright, from any reader."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, features

from mm_core.contracts import VideoInfo
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.images import read_image
from mm_core.data.media.package_readers import DecordReader
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from support.readers import TORCHCODEC

READERS = [PyAVReader(), pytest.param(DecordReader(), id="decord"), TORCHCODEC]
ORIENTATION = 0x0112
NOISE = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline.jpg": ("RGB", {"quality": 95}),  # more than FFmpeg looks at before it goes by the name
    "small.jpg": ("RGB", {"quality": 5}),  # and less
    "sharp.jpeg": ("RGB", {"quality": 95, "subsampling": 0}),
    "progressive.jpg": ("RGB", {"quality": 95, "progressive": True}),
    "grey.jpg": ("L", {"quality": 95}),
    "cmyk.jpg": ("CMYK", {"quality": 95}),
    "lossy.webp": ("RGB", {"quality": 80}),
    "lossless.webp": ("RGB", {"lossless": True}),
    "a.bmp": ("RGB", {}),
    "palette.bmp": ("P", {}),
    "a.png": ("RGB", {}),
    "palette.png": ("P", {}),
    "alpha.png": ("RGBA", {}),
    "a.tiff": ("RGB", {"compression": "tiff_lzw"}),
    "a.ppm": ("RGB", {}),
}


def save(path: Path, mode: str = "RGB", orientation: int = 1, **options: Any) -> Path:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(NOISE).convert(mode).save(path, **(options | ({"exif": exif} if orientation > 1 else {})))
    return path


def decoded(path: Path) -> torch.Tensor:
    """uint8 [Y,X,3] by Pillow."""
    with Image.open(path) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB")))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", KINDS)
def test_a_picture_is_one_frame_of_the_pixels_that_pillow_decodes(tmp_path: Path, reader, name: str) -> None:
    mode, options = KINDS[name]
    file = save(tmp_path / name, mode, **options)
    assert reader.probe(file) == VideoInfo(120, 90, 25.0, 1, 0.04)
    frames = reader.read(file, [0.0, 0.02])
    assert frames.dtype == torch.uint8 and frames.shape == (2, 90, 120, 3)
    assert torch.equal(frames[0], decoded(file)) and torch.equal(frames[0], frames[1])
    with pytest.raises(DataError, match=r"a frame at 0.060 s is needed, but the video ends at 0.040 s"):
        reader.read(file, [0.06])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("orientation", range(2, 9))
def test_pictures_are_upright(tmp_path: Path, reader, orientation: int) -> None:
    file = save(tmp_path / "a.jpg", orientation=orientation, quality=95)
    info, (frame,) = reader.probe(file), reader.read(file, [0.0])
    assert (info.height, info.width) == frame.shape[:2] == ((120, 90) if orientation > 4 else (90, 120))
    assert torch.equal(frame, decoded(file))
    assert torch.equal(frame.permute(2, 0, 1), read_image(file)), "as images are elsewhere"


def test_pictures_train_as_clips_of_one_frame(tmp_path: Path, annotate) -> None:
    rows = [{"path": name, "cap": "a"} for name in ("baseline.jpg", "a.png", "lossy.webp", "a.bmp")]
    for row in rows:
        mode, options = KINDS[row["path"]]
        save(tmp_path / row["path"], mode, **options)
    dataset = VideoTextDataset(annotate(tmp_path / "rows.json", rows), 1, 90, 120)
    for index, row in enumerate(rows):
        pixels = dataset[index]["pixels"]
        assert torch.equal(pixels, decoded(tmp_path / row["path"]).permute(2, 0, 1)[:, None])
    short = VideoTextDataset(tmp_path / "rows.json", 5, 90, 120)
    with pytest.raises(DataError, match="too short: it has 1 frame, but a clip needs 5"):
        short[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_picture_that_is_cut_short_is_refused(tmp_path: Path, reader) -> None:
    """FFmpeg fills the rest with grey."""
    data = save(tmp_path / "a.jpg", quality=95).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="truncated") as caught:
        reader.read(tmp_path / "cut.jpg", [0.0])
    assert caught.value.where == str(tmp_path / "cut.jpg")


def test_a_picture_larger_than_max_pixels_is_refused_by_its_header(tmp_path: Path) -> None:
    file = save(tmp_path / "a.jpg", quality=95)
    with pytest.raises(DataError, match="frames of 90 x 120 are larger than the reader's max_pixels"):
        PyAVReader(max_pixels=1000).probe(file)


@pytest.mark.parametrize("reader", READERS)
def test_a_name_is_no_pattern_and_no_address(tmp_path: Path, encode, reader) -> None:
    """FFmpeg reads a%03d.jpg as the numbered pictures beside it, and 12:30.mp4 by a protocol `12`."""
    Image.fromarray(NOISE // 2).save(tmp_path / "a001.jpg", quality=95)
    file = save(tmp_path / "a%03d.jpg", quality=95)
    assert torch.equal(reader.read(file, [0.0])[0], decoded(file))
    encode(tmp_path / "12:30.mp4", 3)
    with chdir(tmp_path):
        assert reader.probe(Path("12:30.mp4")).num_frames == 3
        assert reader.read(Path("12:30.mp4"), [0.0]).shape == (1, 48, 64, 3)


@pytest.mark.parametrize("reader", READERS)
def test_a_moving_picture_of_one_frame_has_a_rate(tmp_path: Path, reader) -> None:
    file = save(tmp_path / "a.gif")
    info = reader.probe(file)
    assert (info.num_frames, info.fps > 0) == (1, True)
    assert torch.equal(reader.read(file, [0.5 / info.fps])[0], decoded(file))


@pytest.mark.parametrize("reader", READERS)
def test_an_animation_that_ffmpeg_takes_for_a_picture_is_refused(tmp_path: Path, reader) -> None:
    path = tmp_path / "a.webp"
    frames = [Image.fromarray(np.roll(NOISE, shift, 1)) for shift in (0, 9, 18)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40)
    for act in (lambda: reader.probe(path), lambda: reader.read(path, [0.0])):
        with pytest.raises(DataError) as fault:
            act()
        assert fault.value.what == "the WEBP file is animated (3 frames), but is read as one picture"


@pytest.mark.parametrize("reader", READERS)
def test_pages_and_previews_do_not_make_a_picture_an_animation(tmp_path: Path, reader) -> None:
    picture = Image.fromarray(NOISE)
    for name, kind in (("a.jpg", "MPO"), ("a.tiff", "TIFF")):
        picture.save(tmp_path / name, format=kind, save_all=True, append_images=[picture.resize((16, 16))])
        assert reader.probe(tmp_path / name).num_frames == 1


@pytest.mark.parametrize("reader", READERS)
def test_an_unknown_codec_is_a_readable_error(tmp_path: Path, encode, reader) -> None:
    data = encode(tmp_path / "a.mkv", 3).read_bytes()
    file = tmp_path / "unknown.mkv"
    file.write_bytes(data.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG9/ISO/XYZ"))
    with pytest.raises(DataError, match="FFmpeg does not support the codec of this video") as caught:
        reader.probe(file)
    assert caught.value.where == str(file)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # it names what is damaged
@pytest.mark.parametrize(
    "kind", ["jpg", "png", "webp", "bmp", "gif", "tiff", "avif", "qoi", "dds", "tga", "jp2"]
)
def test_damaged_pictures_raise_only_readable_errors(tmp_path: Path, kind: str) -> None:
    """Decoders raise whatever a damaged file makes of them: RuntimeError, IndexError, NotImplementedError."""
    if kind == "avif" and not features.check("avif"):
        pytest.skip("this Pillow knows no AVIF")
    rng = np.random.default_rng(0)
    try:
        data = save(tmp_path / f"a.{kind}").read_bytes()
    except (OSError, ValueError, KeyError):
        pytest.skip(f"this Pillow writes no {kind}")
    refused = 0
    for trial in range(12):
        damaged = np.frombuffer(data, dtype=np.uint8).copy()
        damaged[rng.integers(0, 300, 6)] = rng.integers(0, 256, 6)
        file = tmp_path / f"{trial}.{kind}"
        file.write_bytes(damaged.tobytes()[: len(data) // (1 + trial % 3)])
        for read in (read_image, PyAVReader().probe):
            try:
                read(file)
            except DataError as error:
                assert error.where == str(file)
                refused += 1
    assert refused
