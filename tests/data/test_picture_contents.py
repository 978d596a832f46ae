"""Pictures by their content: sizes in headers, colours by profile, transparency, and the formats opened."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps, features

from mm_core.builtin.configs.data import MediaSource
from mm_core.data.cache.hashes import FileHashes
from mm_core.data.cache.rows import CacheRows, PartKey
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media import versions
from mm_core.data.media.image_headers import image_size
from mm_core.data.media.images import read_photo
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError

ORIENTATION = 0x0112
NOISE = np.random.default_rng(0).integers(0, 255, (40, 80, 3), dtype=np.uint8)
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def media(path: Path, *names: str, num_frames: int = 1, size: int | None = 16) -> MediaTextDataset:
    path.joinpath("t.json").write_text(json.dumps([{"path": name, "cap": "a"} for name in names]))
    return MediaTextDataset([MediaSource(str(path / "t.json"))], num_frames, size, size)


def over_white(path: Path) -> torch.Tensor:
    """uint8 [3,Y,X] by Pillow alone, in the way of its own pages."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
        if profile := opened.info.get("icc_profile"):
            from io import BytesIO

            own = ImageCms.ImageCmsProfile(BytesIO(profile))
            alpha = image.getchannel("A") if image.mode == "RGBA" else None
            colours = image.convert("RGB") if image.mode == "RGBA" else image
            image = ImageCms.profileToProfile(colours, own, ImageCms.createProfile("sRGB"), outputMode="RGB")
            if alpha is not None:
                image.putalpha(alpha)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            white.alpha_composite(image)
            image = white
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def p3() -> bytes:
    """A profile of RGB with the primaries of Display P3, made from those of sRGB: other colorants."""
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = int.from_bytes(content[128:132])
    for at in range(132, 132 + 12 * count, 12):
        if content[at : at + 4] in (b"rXYZ", b"bXYZ"):  # red and blue change places
            content[at : at + 1] = b"b" if content[at : at + 1] == b"r" else b"r"
    return bytes(content)


@pytest.mark.parametrize("by", ["exif", "xmp"])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "avif", "heic"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_header_has_the_size_of_the_decoded_picture(tmp_path, suffix, orientation, by):
    if suffix == "heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    if suffix == "avif" and not features.check("avif"):
        pytest.skip("this Pillow knows no AVIF")
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    xmp = XMP.format(orientation).encode()
    given = {"exif": exif} if by == "exif" else {"xmp": xmp}
    if suffix == "tif":
        given = {"tiffinfo": {ORIENTATION: orientation} if by == "exif" else {700: xmp}}
    if (suffix, by) == ("png", "xmp"):
        from PIL.PngImagePlugin import PngInfo

        given = {"pnginfo": PngInfo()}
        given["pnginfo"].add_itxt("XML:com.adobe.xmp", xmp.decode())
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(NOISE).save(file, **given)
    read = read_photo(file, 10**6)
    assert image_size(file) == tuple(read.shape[1:])
    assert tuple(read.shape[1:]) in ((40, 80), (80, 40))
    if suffix != "heic" and (by == "exif" or suffix in ("jpg", "png", "webp")):  # a HEIC has its own turns
        assert image_size(file) == ((80, 40) if orientation > 4 else (40, 80))


def test_a_png_whose_orientation_follows_its_pixels_has_the_size_of_what_is_read(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(NOISE).save(tmp_path / "a.png", exif=exif)
    content = (tmp_path / "a.png").read_bytes()
    at = content.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(content[at : at + 4])
    moved = content[:at] + content[end:-12] + content[at:end] + content[-12:]
    (tmp_path / "a.png").write_bytes(moved)
    assert (
        image_size(tmp_path / "a.png") == tuple(read_photo(tmp_path / "a.png", 10**6).shape[1:]) == (80, 40)
    )


@pytest.mark.parametrize("suffix", ["heic", "heif", "bin", "mp4", "jpg"])
def test_a_heic_is_read_whole_under_any_suffix(tmp_path, suffix):
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(Image.new("RGB", (29, 100), "red")).save(tmp_path / "p.heic")
    (tmp_path / "p.heic").rename(tmp_path / f"p.{suffix}")
    data = media(tmp_path, f"p.{suffix}")
    info = data.header(data.rows[0])
    assert (info.width, info.height, info.num_frames) == (29, 100, 1)
    pixels = data[0]["pixels"].float()
    assert pixels.shape == (3, 1, 16, 16) and pixels[0].mean() > 240 and pixels[1:].mean() < 15


def test_a_heic_without_its_package_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "p.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match="the image is HEIC") as fault:
        read_photo(tmp_path / "p.heic", 100)
    assert "mm-core[heif]" in str(fault.value)


def test_an_avif_without_its_decoder_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "p.avif").write_bytes(b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(64))
    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(DataError, match="the image is AVIF") as fault:
        read_photo(tmp_path / "p.avif", 100)
    assert "pillow>=11.3" in str(fault.value)


@pytest.mark.parametrize("suffix", ["", ".bin", ".mp4"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_a_picture_without_its_suffix_is_over_white(tmp_path, kind, suffix):
    image = Image.new("RGBA", (16, 16), (10, 20, 30, 0))
    image.paste((200, 0, 0, 128), (0, 0, 8, 16))
    image.save(tmp_path / f"a{suffix}", kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    expected = over_white(tmp_path / f"a{suffix}")
    assert torch.equal(media(tmp_path, f"a{suffix}")[0]["pixels"][:, 0], expected)
    annotated = VideoTextDataset(tmp_path / "t.json", 1, 16, 16)
    assert torch.equal(annotated[0]["pixels"][:, 0], expected)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a"])
def test_a_clip_under_the_suffix_of_a_picture_is_a_clip(tmp_path, encode, name):
    encode(tmp_path / "c.mp4", 6).rename(tmp_path / name)
    for size in (None, 16):
        data = media(tmp_path, name, num_frames=1, size=size)
        assert data.header(data.rows[0]).num_frames == 6
    assert data[0]["pixels"].shape == (3, 1, 16, 16)
    data = media(tmp_path, name, num_frames=5, size=None)
    assert data.row_sizes().tolist() == [[6, 48, 64]]
    assert data.sample_of(0, (5, 16, 16), None)["pixels"].shape == (3, 5, 16, 16)


def test_a_clip_among_pictures_of_one_size_is_refused_by_name(tmp_path, encode):
    encode(tmp_path / "c.mp4", 6).rename(tmp_path / "c.jpg")
    with pytest.raises(DataError, match="the file is a clip, which cannot share a micro-batch with images"):
        media(tmp_path, "c.jpg", num_frames=5)[0]


def test_an_animated_gif_under_the_suffix_of_a_picture_is_a_clip_and_a_still_one_a_picture(tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moves.png", "GIF", save_all=True, append_images=frames[1:], duration=100)
    frames[0].save(tmp_path / "still.png", "GIF")
    data = media(tmp_path, "moves.png", "still.png", num_frames=1)
    assert [data[each]["pixels"][0].min() > 200 for each in (0, 1)] == [True, True]
    assert [data.decode(each).num_frames for each in (0, 1)] == [3, 1]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_the_colours_of_a_profile_are_those_a_viewer_shows(tmp_path, suffix, mode):
    if (suffix == "jpg" and mode != "RGB") or (suffix == "webp" and mode == "P"):
        pytest.skip("the format has no such mode")
    image = Image.fromarray(NOISE).convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    file = tmp_path / f"a.{suffix}"
    image.save(file, icc_profile=p3(), **({"lossless": True} if suffix == "webp" else {}))
    plain = torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)
    found = read_photo(file, 10**6)
    assert (found.int() - plain.int()).abs().max() > 50, "it changes something"
    if mode != "P":
        assert (found.int() - over_white(file).int()).abs().max() <= 1


def test_a_profile_of_srgb_one_of_other_colours_and_a_damaged_one_change_nothing(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for number, (mode, profile) in enumerate((("RGB", srgb), ("L", srgb), ("RGB", b"damaged"))):
        image = Image.fromarray(NOISE).convert(mode)
        image.save(tmp_path / f"{number}.png", icc_profile=profile)
        expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(read_photo(tmp_path / f"{number}.png", 10**6), expected)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a", "a.mp4", "a.eps"])
def test_no_picture_starts_ghostscript(tmp_path, monkeypatch, name):
    called = tmp_path / "called"
    for program in ("gs", "gswin32c", "gswin64c"):
        script = tmp_path / "bin" / program
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # looked for anew
    (tmp_path / name).write_bytes(EPS)
    data = media(tmp_path, name)
    for act in (lambda: data[0], lambda: data.decode(0), lambda: read_photo(tmp_path / name, 10**6)):
        with pytest.raises(DataError):
            act()
    assert not called.exists()
    with pytest.raises(DataError, match="it is EPS") as fault:
        read_photo(tmp_path / name, 10**6)
    assert "HEIC" in str(fault.value)


@pytest.mark.parametrize("kind", ["JPEG2000", "TGA", "ICO", "DDS", "PCX", "SGI"])
def test_a_format_that_the_page_does_not_name_is_not_opened(tmp_path, kind):
    Image.fromarray(NOISE).resize((16, 16)).save(tmp_path / "a.png", kind)
    with pytest.raises(DataError, match="cannot identify image file"):
        read_photo(tmp_path / "a.png", 10**6)


def test_a_picture_larger_than_the_readers_limit_is_refused_before_it_is_decoded(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "a", "PNG")
    with pytest.raises(DataError, match="frames of 40 x 80 are larger than the reader's max_pixels"):
        PyAVReader(max_pixels=100).read(tmp_path / "a", [0.0])


def keys(data: MediaTextDataset, folder: Path) -> list[bytes]:
    rows = CacheRows(data, None, 1, 0)
    found = rows.keys(
        [(row, 0) for row in range(len(rows))], [PartKey("pixels", False, bytes(16))], FileHashes(folder)
    )
    return [each.tobytes() for each in found]


def test_the_cache_encodes_anew_the_pictures_that_are_read_otherwise_and_no_others(tmp_path, monkeypatch):
    image = Image.fromarray(NOISE)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    clear = image.convert("RGBA")
    clear.putalpha(100)
    image.save(tmp_path / "p3.jpg", icc_profile=p3())
    clear.save(tmp_path / "clear", "PNG")
    image.save(tmp_path / "profiled", "JPEG", icc_profile=p3())
    image.save(tmp_path / "plain.jpg")
    image.save(tmp_path / "srgb.png", icc_profile=srgb)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg", icc_profile=b"any")
    clear.save(tmp_path / "clear.png")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    image.save(tmp_path / "turned.tif", tiffinfo={ORIENTATION: 6})
    image.save(tmp_path / "opaque", "PNG")
    image.save(tmp_path / "still.png", "GIF")
    others = [
        "plain.jpg",
        "srgb.png",
        "cmyk.jpg",
        "clear.png",
        "turned.jpg",
        "turned.tif",
        "opaque",
        "still.png",
    ]
    data = media(tmp_path, "p3.jpg", "clear", "profiled", *others)
    now = keys(data, tmp_path / "a")
    assert now == keys(data, tmp_path / "b") and len({*now}) == len(now)
    monkeypatch.setattr(versions, "read_anew", lambda *given, **more: False)  # what version 1 had
    before = keys(data, tmp_path / "c")
    assert [one != other for one, other in zip(now, before, strict=True)] == [True] * 3 + [False] * len(
        others
    )


def test_a_clip_under_the_suffix_of_a_picture_has_the_key_of_its_frames(tmp_path, encode):
    encode(tmp_path / "c.mp4", 6).rename(tmp_path / "c.jpg")
    data = media(tmp_path, "c.jpg", num_frames=5, size=None)
    one, other = (data.source_of(0, (frames, 16, 16), None).made for frames in (1, 5))
    assert (one["frames"], other["frames"]) == (1, 5)
