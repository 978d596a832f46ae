"""Tiles are those of Transformers' processor, which published InternVL folders name."""

from __future__ import annotations

import json
import random
import struct
import zlib

import numpy as np
import pytest
import torch
import transformers
from mm_internvl.data.config import ConversationsConfig
from mm_internvl.data.conversations import Conversations
from mm_internvl.data.tiling import Tiling, read_tiling
from mm_internvl.testing import make_tiny_checkpoint
from PIL import Image
from transformers.models.internvl import processing_internvl

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.data.media.images import read_image
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import CheckpointError, DataError
from mm_core.tasks.conversations.media import image_size

Processor = getattr(transformers, "GotOcr2ImageProcessorPil", None)
fifth = pytest.mark.skipif(Processor is None, reason="before 5.0 the class fails on the smallest images")


def sizes() -> list[tuple[int, int]]:
    """50 (height, width): small and large, square, tall and wide, among them ties between grids."""
    draw = random.Random(0)
    drawn = [(draw.randint(8, 900), draw.randint(8, 900)) for _ in range(36)]
    exact = [(1, 1), (448, 448), (447, 449), (896, 896), (317, 317), (640, 640), (448, 896), (896, 448)]
    return [*drawn, *exact, (100, 1200), (1200, 100), (300, 200), (200, 300), (768, 1024), (1080, 720)]


def picture(height: int, width: int) -> torch.Tensor:
    """uint8 [3,Y,X] of noise: every pixel matters."""
    generator = np.random.default_rng(height * 10_000 + width)
    return torch.from_numpy(generator.integers(0, 256, (3, height, width), dtype=np.uint8))


@fifth
@pytest.mark.parametrize(("least", "most", "side"), [(1, 12, 56), (2, 6, 56), (1, 1, 56)])
def test_tiles_equal_the_transformers_processor(least, most, side):
    theirs = Processor(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=least, max_patches=most
    )
    ours = Tiling(
        side, side, least, most, mean=tuple(theirs.image_mean), std=tuple(theirs.image_std), resample=3
    )
    assert len(sizes()) == 50
    for height, width in sizes():
        image = picture(height // 4 + 1, width // 4 + 1)
        array = Image.fromarray(image.permute(1, 2, 0).numpy())
        wanted = theirs(array, return_tensors="pt")
        found = ours.cut(image)
        assert len(found) == ours.count(*image.shape[-2:]) == int(wanted["num_patches"][0])
        torch.testing.assert_close(found, wanted["pixel_values"], rtol=0, atol=1e-5)


@fifth
def test_grids_of_448_equal_the_transformers_processor():
    """At InternVL's own tile size the grids alone, over the same 50 sizes at full size, and 3 in pixels."""
    theirs = Processor(size={"height": 448, "width": 448}, crop_to_patches=True)
    ours = Tiling(mean=tuple(theirs.image_mean), std=tuple(theirs.image_std))
    for height, width in sizes():
        assert ours.count(height, width) == theirs.get_number_of_image_patches(height, width, {})
    for height, width in ((300, 200), (448, 448), (100, 300)):
        image = picture(height, width)
        wanted = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()), return_tensors="pt")
        torch.testing.assert_close(ours.cut(image), wanted["pixel_values"], rtol=0, atol=1e-5)


def test_a_header_has_the_size_of_the_upright_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera held upright
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    assert image_size(tmp_path / "a.jpg", 10_000) == (40, 30)
    assert read_image(tmp_path / "a.jpg").shape[-2:] == (40, 30)


ORIENTATIONS = {
    "text": (2, b"6\0", 2),
    "long text": (2, b"Rotate 90 CW\0", 13),
    "undefined": (7, b"\6\0\0\0", 4),
    "beyond": (3, struct.pack("<H", 9), 1),
    "a quarter": (3, struct.pack("<H", 6), 1),
    "none": (3, struct.pack("<H", 1), 1),
}
"""EXIF's type, bytes and count of an orientation."""


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_whatever_an_orientation_holds_headers_and_pixels_agree(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    for name, (kind, value, count) in ORIENTATIONS.items():
        if suffix == "tiff" and kind != 3:  # Pillow writes no others
            continue
        short = value if len(value) <= 4 else struct.pack("<I", 26)  # longer ones stand behind the table
        entry = struct.pack("<HHHI", 1, 0x0112, kind, count) + short.ljust(4, b"\0")
        header = b"Exif\0\0II*\0" + struct.pack("<I", 8) + entry + bytes(4) + value[: 99 * (len(value) > 4)]
        Image.new("RGB", (50, 30)).save(file, exif=header)
        upright = (50, 30) if name == "a quarter" else (30, 50)
        assert image_size(file, 1500) == tuple(read_image(file).shape[1:]) == upright, name


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_truncated_exif_is_a_readable_error_or_ignored(tmp_path):
    file = tmp_path / "a.jpg"
    for torn in (b"", b"II", b"II*\0\10\0\0\0", b"II*\0\10\0\0\0\1\0\x12\1", b"no EXIF"):
        Image.new("RGB", (50, 30)).save(file, exif=b"Exif\0\0" + torn)
        said = []
        for reading in (lambda: image_size(file, 1500), lambda: tuple(read_image(file).shape[1:])):
            try:
                said.append(reading())
            except DataError as fault:
                said.append(fault.what)
        assert said[0] == said[1], torn
        assert said[0] == (30, 50) or said[0].startswith("the image cannot be read: "), torn


def bomb(width: int, height: int) -> bytes:
    """A PNG of 33 kB at most that claims these sizes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("side", "sentence"),
    [
        (
            60_000,
            "bomb.png: the image of 3,600,000,000 pixels is larger than Pillow opens\n"
            "  accepted: up to 178,956,970 pixels\n"
            "  hint: shrink the image",
        ),
        (
            9_000,
            "bomb.png: an image of 9000 x 9000 exceeds max_pixels\n  accepted: up to 67,108,864 pixels",
        ),
    ],
)
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, side, sentence):
    (tmp_path / "bomb.png").write_bytes(bomb(side, side))
    with pytest.raises(DataError) as fault:
        image_size(tmp_path / "bomb.png", 8192 * 8192)
    assert sentence in str(fault.value)


def test_what_is_no_image_is_one_error(tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    for name, what in (("gone.png", "there is no such image"), ("notes.txt", "the image cannot be read: ")):
        with pytest.raises(DataError, match=what):
            image_size(tmp_path / name, 10_000)


def test_a_folder_determines_how_its_images_are_cut(tmp_path):
    assert read_tiling(tmp_path) == Tiling()
    settings = (
        '{"size": {"height": 28, "width": 28}, "max_patches": 4, "image_mean": [0, 0, 0], "resample": 2}'
    )
    (tmp_path / "preprocessor_config.json").write_text(settings)
    assert read_tiling(tmp_path) == Tiling(28, 28, 1, 4, mean=(0, 0, 0), resample=2)
    assert read_tiling(tmp_path, max_tiles=2).max_tiles == 2
    with pytest.raises(CheckpointError, match="cannot be cut into 5 to 4 tiles"):
        read_tiling(tmp_path, min_tiles=5)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 448}}')
    with pytest.raises(CheckpointError, match="is not the height and width of tiles"):
        read_tiling(tmp_path)


def test_a_folder_in_opengvlabs_layout_determines_it_by_its_own_keys(tmp_path):
    """Keys of `preprocessor_config.json` and `config.json` of OpenGVLab/InternVL3_5-1B."""
    (tmp_path / "preprocessor_config.json").write_text('{"size": 448, "crop_size": 448, "resample": 3}')
    (tmp_path / "config.json").write_text('{"min_dynamic_patch": 1, "max_dynamic_patch": 6}')
    assert read_tiling(tmp_path) == Tiling(max_tiles=6)


# -- what OpenGVLab's config.json says ---------------------------------------------------------------


@fifth
def test_without_dynamic_sizes_an_image_is_one_tile(tmp_path):
    """`dynamic_image_size: false`, unless the dataset's own max_tiles is set."""
    (tmp_path / "config.json").write_text('{"dynamic_image_size": false, "max_dynamic_patch": 6}')
    (tmp_path / "preprocessor_config.json").write_text('{"size": 56, "max_patches": 12, "min_patches": 2}')
    ours = read_tiling(tmp_path)
    theirs = Processor(
        size={"height": 56, "width": 56}, crop_to_patches=False, image_mean=ours.mean, image_std=ours.std
    )
    image = picture(60, 200)
    wanted = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()), return_tensors="pt")["pixel_values"]
    assert ours.count(60, 200) == len(wanted) == 1
    torch.testing.assert_close(ours.cut(image), wanted, rtol=0, atol=1e-5)
    assert read_tiling(tmp_path, max_tiles=4).count(60, 200) == 4  # three in a row and their thumbnail
    with pytest.raises(CheckpointError, match="cannot be cut into 2 to 1 tiles"):
        read_tiling(tmp_path, min_tiles=2)


@fifth
def test_without_a_thumbnail_the_tiles_stand_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"use_thumbnail": false}')
    (tmp_path / "preprocessor_config.json").write_text('{"size": 56}')
    ours = read_tiling(tmp_path)
    theirs = Processor(
        size={"height": 56, "width": 56}, crop_to_patches=True, image_mean=ours.mean, image_std=ours.std
    )
    for size in ((60, 200), (50, 50)):
        image = picture(*size)
        wanted = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()), return_tensors="pt")["pixel_values"]
        wanted = wanted[: max(1, len(wanted) - 1)]
        assert ours.count(*size) == len(wanted)
        torch.testing.assert_close(ours.cut(image), wanted, rtol=0, atol=1e-5)


def test_an_image_processor_that_does_not_cut_is_the_published_one(tmp_path):
    """Every published folder has `crop_to_patches: false`, and InternVLProcessor cuts by its own default."""
    folder = make_tiny_checkpoint(tmp_path)
    assert json.loads((folder / "preprocessor_config.json").read_text())["crop_to_patches"] is False
    assert read_tiling(folder).max_tiles == 12
    own = getattr(processing_internvl.InternVLProcessor, "images_kwargs", None)
    own = own or processing_internvl.InternVLProcessorKwargs._defaults["images_kwargs"]
    assert own["crop_to_patches"] is True


def test_images_with_a_border_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"pad2square": true}')
    with pytest.raises(CheckpointError) as fault:
        read_tiling(tmp_path)
    assert (
        fault.value.what
        == "pad2square is set: images padded to a square before they are cut are not supported"
    )
    assert fault.value.accepted == "pad2square: false, as in InternVL 1.5 to 3.5"


# -- several images in a row -------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "most"), [(0, 6), (1, 6), (2, 3), (4, 1), (7, 1)])
def test_images_of_a_row_share_its_tiles(images, most):
    """max_tiles // images, one at least (multi_modal_multi_image_get_item of OpenGVLab's training)."""
    assert Tiling(min_tiles=2, max_tiles=6).shared(images) == Tiling(min_tiles=min(2, most), max_tiles=most)


@fifth
def test_shared_tiles_are_the_same_in_training_and_asking(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "tiny")
    files = [picture(60, 200), picture(200, 60), picture(130, 130)]
    for number, image in enumerate(files):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    row = {
        "images": [f"{number}.png" for number in range(3)],
        "messages": [
            {"role": "user", "content": "<image><image><image>\nwhich?"},
            {"role": "assistant", "content": "red"},
        ],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    options = ConversationsConfig(
        (ConversationSource(str(tmp_path / "rows.jsonl")),), str(folder), 400, max_tiles=6
    )
    read = {}
    for share in (False, True):
        fields = {**vars(options), "share_tiles": share, "reader": PyAVReader()}
        pixels = Conversations(**fields)[0]["pieces"][0].vision["pixel_values"]
        asked = Conversations.conversing(**fields).questions(tmp_path / "rows.jsonl")[0]()
        assert torch.equal(asked.inputs["pixel_values"], pixels)
        read[share] = pixels
    for share, most in ((False, 6), (True, 2)):
        theirs = Processor.from_pretrained(folder, crop_to_patches=True, max_patches=most)
        images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in files]
        wanted = torch.cat([theirs(image, return_tensors="pt")["pixel_values"] for image in images])
        torch.testing.assert_close(read[share], wanted, rtol=0, atol=1e-5)
    assert (len(read[False]), len(read[True])) == (4 + 4 + 5, 3 + 3 + 1)
