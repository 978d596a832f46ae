"""The dataset media_text: images and clips as users have them, captions, sources, and bad files by name."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from mm_core.builtin.configs.data import CaptionTags, MediaSource
from mm_core.contracts import Randomness, SampleKey
from mm_core.data.datasets.media_report import check, inspect, remarks
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.images import read_photo
from mm_core.data.rows.mixture import Mixture, drawn_tags
from mm_core.errors import ContractError, DataError, RunWarning
from support.archives import archive
from support.damaged import damaged

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def folder(path: Path, *names: str) -> Path:
    """A folder of 8x8 images, each with a caption."""
    path.mkdir(exist_ok=True)
    for name in names:
        Image.new("RGB", (8, 8), RED).save(path / name)
        (path / name).with_suffix(".txt").write_text(f"caption of {name}")
    return path


def table(path: Path, *rows: dict) -> MediaSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MediaSource(str(path))


def dataset(*sources: MediaSource | Path, num_frames: int = 1, **fields) -> MediaTextDataset:
    listed = [one if isinstance(one, MediaSource) else MediaSource(str(one)) for one in sources]
    return MediaTextDataset(listed, num_frames, 8, 8, **fields)


def corners(path: Path) -> list[tuple[int, ...]]:
    """The colours at the left and right top, and left and right bottom."""
    pixels = read_photo(path, 10**6)
    return [tuple(pixels[:, y, x].tolist()) for y in (1, -2) for x in (1, -2)]


def flag() -> Image.Image:
    """Red and green above, blue and white below, of 20 x 12 pixels."""
    pixels = np.zeros((12, 20, 3), np.uint8)
    pixels[:6, :10], pixels[:6, 10:], pixels[6:, :10], pixels[6:, 10:] = RED, GREEN, BLUE, WHITE
    return Image.fromarray(pixels)


# -- archives ---------------------------------------------------------------------------------------


def captions(path: Path) -> dict[str, str]:
    data = dataset(path)
    return {Path(data[each]["id"]).name: data[each]["caption"] for each in range(len(data))}


@pytest.mark.parametrize("order", [sorted, reversed, lambda names: sorted(names, key=lambda n: n[::-1])])
def test_a_member_of_an_archive_has_the_text_of_its_own_name(tmp_path, order):
    """File names with dots, and the texts anywhere in the archive."""
    photo = (folder(tmp_path, "p.png") / "p.png").read_bytes()
    members = {f"./img.00{n}.png": photo for n in range(4)}
    members |= {f"./img.00{n}.txt": b"number %d" % n for n in range(3)}
    members |= {"._img.000.png": b"of another file system", "._img.000.txt": b"\xff"}
    path = archive(tmp_path / "a.tar", {name: members[name] for name in order([*members])})
    with pytest.warns(RunWarning, match="1 row left out: no .txt member"):
        assert captions(path) == {f"img.00{n}.png": f"number {n}" for n in range(3)}


def test_a_member_without_a_text_of_its_name_has_that_of_its_webdataset_key(tmp_path):
    photo = (folder(tmp_path, "p.png") / "p.png").read_bytes()
    members = {
        **{"a.left.png": photo, "a.right.png": photo, "a.txt": b"both"},
        **{"b.image.png": photo, "b.caption.txt": b"one", "b.x.json": b"{}", "b.y.json": b"{}"},
        **{"c.jpg.png": photo, "c.meta.json": b'{"cap": "of the json"}'},
    }
    path = archive(tmp_path / "a.tar", members)
    both = {"a.left.png": "both", "a.right.png": "both"}
    assert captions(path) == {**both, "b.image.png": "one", "c.jpg.png": "of the json"}


# -- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tiff", "a.jpg", "a.bmp"])
def test_every_format_has_the_same_colours(tmp_path, name):
    options = {"lossless": True} if name == "a.webp" else {"quality": 95, "subsampling": 0}
    flag().save(tmp_path / name, **options)
    for found, expected in zip(corners(tmp_path / name), (RED, GREEN, BLUE, WHITE), strict=True):
        assert np.abs(np.subtract(found, expected)).max() <= (4 if name == "a.jpg" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_upright_by_its_orientation(tmp_path, orientation):
    turned = flag()
    for step in {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }[orientation]:
        turned = turned.transpose(step)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned.save(tmp_path / "a.png", exif=exif)
    assert corners(tmp_path / "a.png") == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    image = Image.new("RGBA", (20, 12), (255, 255, 255, 255))
    image.paste((0, 0, 0, 0), (0, 0, 10, 12))  # black that nobody sees
    image.paste((0, 0, 0, 128), (10, 6, 20, 12))
    if mode == "LA":
        image = image.convert("LA")
    if mode in ("P", "PA"):
        image = image.quantize(4)
    image.save(tmp_path / "a.png")
    left, right, below, half = corners(tmp_path / "a.png")
    assert left == right == below == WHITE
    assert half == (127, 127, 127)


def test_sixteen_bits_keep_their_upper_eight(tmp_path):
    shades = (np.arange(240, dtype=np.uint16).reshape(12, 20) * 256 + 255).astype(np.uint16)
    Image.fromarray(shades).save(tmp_path / "a.png")
    Image.fromarray(shades).save(tmp_path / "a.tiff")
    for name in ("a.png", "a.tiff"):
        found = read_photo(tmp_path / name, 1000)
        assert (found == torch.from_numpy(shades // 256).byte()).all()


def test_sixteen_bits_of_three_colours_keep_their_upper_eight(tmp_path):
    header = b"\x00\x00\x00\x02\x00\x00\x00\x01\x10\x02\x00\x00\x00"  # 2 x 1, 16 bits, RGB
    line = b"\x00" + bytes.fromhex("ff8012340000000080007fff")

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(line)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    assert read_photo(tmp_path / "a.png", 9)[:, 0].T.tolist() == [[255, 0x12, 0], [0, 0x80, 0x7F]]


@pytest.mark.parametrize("name", ["a.jpg", "a.tiff"])
def test_cmyk_is_not_inverted(tmp_path, name):
    flag().convert("CMYK").save(tmp_path / name, **({"quality": 98} if name == "a.jpg" else {}))
    for found, expected in zip(corners(tmp_path / name), (RED, GREEN, BLUE, WHITE), strict=True):
        assert np.abs(np.subtract(found, expected)).max() < 12


def test_cmyk_with_a_damaged_profile_is_converted_without_it(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, content in (("a.tiff", b"no profile"), ("b.tiff", profile)):  # b: of other colours
        flag().convert("CMYK").save(tmp_path / name, icc_profile=content)
        assert corners(tmp_path / name) == [RED, GREEN, BLUE, WHITE]


def test_an_image_of_30000_by_30000_is_refused_by_its_header(tmp_path):
    header = (30_000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
    chunk = b"\x00\x00\x00\x0dIHDR" + header + zlib.crc32(b"IHDR" + header).to_bytes(4)
    source = folder(tmp_path / "p")
    (source / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IEND")
    (source / "a.txt").write_text("x")
    with pytest.raises(DataError, match="the image of 900,000,000 pixels is larger than the dataset's"):
        dataset(source)[0]
    Image.new("L", (300, 300)).save(source / "a.png")
    with pytest.raises(DataError, match="the image of 300 x 300 is larger than the dataset's max_pixels"):
        dataset(source, max_pixels=89_999)[0]


def test_an_image_is_a_clip_of_one_frame(tmp_path):
    flag().save(folder(tmp_path / "p") / "a.png")
    (tmp_path / "p/a.txt").write_text("  a&amp;flag\n")
    sample = dataset(tmp_path / "p", num_frames=49)[0]
    assert sample["pixels"].shape == (3, 1, 8, 8)
    assert sample["pixels"][:, 0, 0, 0].tolist() == [255, 0, 0]
    assert (sample["caption"], sample["id"]) == ("a&flag", str(tmp_path / "p/a.png"))


# -- clips ------------------------------------------------------------------------------------------


def level(sample: dict, frame: int) -> int:
    """The number of a frame by its grey level (20 + 4 k)."""
    return round(float(sample["pixels"][:, frame].float().mean()) / 4 - 5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": (65, 49), "pix_fmt": "yuv444p"},
        {"pix_fmt": "yuv420p10le"},
        {"pix_fmt": "yuv420p10le", "codec": "libx265"},
    ],
)
def test_clips_of_10_bits_and_odd_sizes_have_their_frames(tmp_path, encode, options):
    encode(tmp_path / "a.mp4", 12, **options)
    data = dataset(table(tmp_path / "a.jsonl", {"path": "a.mp4", "cap": "x"}), num_frames=5)
    levels = data[0]["pixels"].float().mean((0, 2, 3))
    # FFmpeg's conversion of 10 bits rounds down by up to two of 255 levels; frames are four apart.
    assert (levels - torch.arange(20.0, 40, 4)).abs().max() < 2.2


def test_a_clip_of_variable_rate_goes_by_time_and_not_by_number(tmp_path, encode):
    ticks = [0, 25, 50, 75, 300, 325, 350, 375, 400, 425, 450, 475]  # a pause of 9 frames
    encode(tmp_path / "a.mp4", ticks=ticks)
    data = dataset(table(tmp_path / "a.jsonl", {"path": "a.mp4", "cap": "x"}), num_frames=4, fps=8)
    assert [level(data[0], frame) for frame in range(4)] == [0, 3, 3, 3]


def test_what_a_row_declares_is_not_trusted(tmp_path, encode):
    encode(tmp_path / "a.mp4", 12)
    wrong = {"num_frames": 2, "fps": 3, "resolution": [9, 9], "width": -1, "height": "tall"}
    data = dataset(table(tmp_path / "a.jsonl", {"path": "a.mp4", "cap": "x", **wrong}), num_frames=9)
    assert level(data[0], 8) == 8 and data[0]["fps"] == 24


def test_members_of_an_archive_are_what_their_files_are(tmp_path, encode):
    flag().save(tmp_path / "1.png")
    encode(tmp_path / "2.mp4", 9)
    content = {name: (tmp_path / name).read_bytes() for name in ("1.png", "2.mp4")}
    texts = {"1.txt": b"a flag", "2.txt": b"grey", "3.jpg": b"\xff\xd8 broken", "3.txt": b"x"}
    archive(tmp_path / "a.tar", dict(sorted({**content, **texts}.items())))
    data = dataset(tmp_path / "a.tar", num_frames=3)
    again = pickle.loads(pickle.dumps(data))
    rows = table(tmp_path / "a.jsonl", {"path": "1.png", "cap": "a flag"}, {"path": "2.mp4", "cap": "grey"})
    for number, plain in enumerate(dataset(rows, num_frames=3)[i] for i in range(2)):
        assert again[number]["pixels"].equal(plain["pixels"]) and again[number]["caption"] == plain["caption"]
    with pytest.raises(DataError) as fault:
        data[2]
    assert fault.value.where == str(tmp_path / "a.tar/3.jpg")


# -- captions and sources -----------------------------------------------------------------------------


def test_captions_and_tags_are_drawn_from_the_given_randomness_alone(tmp_path):
    folder(tmp_path / "p", "a.png")
    row = {"path": "p/a.png", "cap": ["a, b, c, d, e", "v, w, x, y, z"]}
    source = table(tmp_path / "a.jsonl", row)
    tags = CaptionTags(keep=1, shuffle=True, drop=0.5)
    data = dataset(MediaSource(source.annotations, caption_prefix="photo: ", tags=tags))
    assert data[0]["caption"] == "photo: a, b, c, d, e"
    rng = Randomness(3).at("data")
    drawn = [data.sample_at(0, rng.at(epoch, 0))["caption"] for epoch in range(40)]
    assert drawn == [data.sample_at(0, rng.at(epoch, 0))["caption"] for epoch in range(40)]
    assert {text[7] for text in drawn} == {"a", "v"} and len(set(drawn)) > 20


def test_tags_are_dropped_by_their_share_and_kept_in_place():
    text = ",".join(f"t{number}" for number in range(10))
    counts = dict.fromkeys((f"t{number}" for number in range(10)), 0)
    for epoch in range(300):
        found = drawn_tags(text, CaptionTags(keep=2, drop=0.25), Randomness(epoch)).split(", ")
        assert found[:2] == ["t0", "t1"] and found == sorted(found)
        for tag in found:
            counts[tag] += 1
    assert all(count == 300 for count in list(counts.values())[:2])
    assert all(190 < count < 260 for count in list(counts.values())[2:])
    assert drawn_tags("a; b", CaptionTags(separator=";"), Randomness(0)) == "a; b"


def test_a_mixture_takes_whole_turns_and_parts_that_change():
    mixture = Mixture([4, 3, 10], [1.0, 2.0, 0.3])
    assert len(mixture) == 4 + 6 + 3
    seen = [mixture.rows(epoch).tolist() for epoch in range(10)]
    for rows in seen:
        assert rows[:10] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6] and len(set(rows[10:])) == 3
    assert sorted(row for rows in seen for row in rows[10:]) == sorted([*range(7, 17)] * 3)


def test_too_small_weights_leave_nothing(tmp_path):
    with pytest.raises(DataError, match="no image or clip remains"):
        dataset(MediaSource(str(folder(tmp_path / "p", "a.png")), weight=0.2))


def test_media_without_captions_are_a_warning(tmp_path):
    folder(tmp_path / "p", "a.png", "b.png")
    (tmp_path / "p/b.txt").unlink()
    with pytest.warns(RunWarning, match="1 row left out: no .txt file beside it"):
        assert len(dataset(tmp_path / "p")) == 1


def test_images_and_clips_share_no_micro_batch(tmp_path, encode):
    encode(tmp_path / "a.mp4", 9)
    photos = MediaSource(str(folder(tmp_path / "p", "a.png")))
    clips = table(tmp_path / "a.jsonl", {"path": "a.mp4", "cap": "x"})
    options = {"sources": (photos, clips), "num_frames": 5}
    with pytest.raises(ContractError, match=r"p \(images\), .*a.jsonl \(clips\) would join images"):
        MediaTextDataset.check_micro_batch(2, options)
    for size, fitting in (
        (1, options),
        (2, {**options, "num_frames": 1}),
        (2, {**options, "sources": [clips]}),
    ):
        MediaTextDataset.check_micro_batch(size, fitting)
    specs = MediaTextDataset.batch_specs(options)
    assert [spec["num_frames"] for spec in specs.values()] == [5, 1]
    assert [*MediaTextDataset.batch_specs({**options, "sources": [clips]})] == ["clips"]
    data = dataset(photos, clips, num_frames=5)
    rows = [{**data[i], "key": SampleKey(0, i), "weight": 1.0} for i in range(2)]
    with pytest.raises(ContractError, match="a micro-batch would join images"):
        data.collate(rows)


# -- bad files ----------------------------------------------------------------------------------------


def test_a_check_reads_clips_to_their_last_frame(tmp_path, encode):
    damaged(encode, tmp_path / "a.mp4", 120)
    data = dataset(table(tmp_path / "a.jsonl", {"path": "a.mp4", "cap": "x"}), num_frames=2)
    assert data[0]["caption"] == "x"
    (state,) = check(data, 1)
    assert state.fault is not None


def test_inspect_counts_what_each_source_gives(tmp_path, encode):
    encode(tmp_path / "a.mp4", 9)
    rows = ({"path": "a.mp4", "cap": "x", "width": 64}, {"path": "gone.mp4", "cap": "x", "width": 8})
    clips = table(tmp_path / "a.jsonl", *rows)
    photos = MediaSource(str(folder(tmp_path / "p", "a.png", "b.png")), weight=1.5)
    first, second, third = inspect(dataset(photos, MediaSource(clips.annotations, where="width > 9"), clips))
    assert first[1:] == (2, 0, 3, {"8 x 8": 2}, {}, 0, 0)
    assert second[1:] == (0, 1, 1, {"48 x 64, 9 frames": 1}, {"where: width > 9": 1}, 0, 0)
    assert third[1:4] == (0, 2, 2)


def test_a_source_s_caption_is_that_of_empty_files_too_and_is_remarked(tmp_path):
    photos = folder(tmp_path / "p", "a.png", "b.png", "c.png")
    (photos / "a.txt").write_text(" \n")
    (photos / "b.txt").unlink()
    given = MediaSource(str(photos), caption="ohwx", caption_prefix="a photo of ")
    captioned = dataset(given)
    found = [captioned[place]["caption"] for place in range(3)]
    assert found[:2] == ["a photo of ohwx"] * 2 and "ohwx" not in found[2]
    assert remarks(captioned) == [f"{photos}: 2 rows without a caption: the source's is used"]
