"""Tiles are those of Transformers' processor, which published InternVL folders name."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
import torch
import transformers
from mm_internvl.tiling import Tiling, image_size, read_tiling
from PIL import Image

from mm_core.data.images import read_image
from mm_core.errors import CheckpointError, DataError

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


def test_a_header_says_the_size_of_the_upright_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera held upright
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    assert image_size(tmp_path / "a.jpg", 10_000) == (40, 30)
    assert read_image(tmp_path / "a.jpg").shape[-2:] == (40, 30)


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
            "bomb.png: the image has more than the 178956970 pixels that Pillow opens\n"
            "  accepted: up to 67108864 pixels\n  hint: make it smaller: max_pixels of the dataset can not",
        ),
        (
            9_000,
            "bomb.png: an image of 9000x9000 is larger than max_pixels\n  accepted: up to 67108864 pixels",
        ),
    ],
)
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, side, sentence):
    (tmp_path / "bomb.png").write_bytes(bomb(side, side))
    with pytest.raises(DataError) as fault:
        image_size(tmp_path / "bomb.png", 8192 * 8192)
    assert sentence in str(fault.value)


def test_what_is_no_image_is_one_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    for name, what in (("gone.png", "there is no such image"), ("notes.txt", "the image can not be read: ")):
        with pytest.raises(DataError, match=what):
            image_size(tmp_path / name, 10_000)


def test_a_folder_says_how_its_images_are_cut(tmp_path):
    assert read_tiling(tmp_path) == Tiling()
    settings = (
        '{"size": {"height": 28, "width": 28}, "max_patches": 4, "image_mean": [0, 0, 0], "resample": 2}'
    )
    (tmp_path / "preprocessor_config.json").write_text(settings)
    assert read_tiling(tmp_path) == Tiling(28, 28, 1, 4, mean=(0, 0, 0), resample=2)
    assert read_tiling(tmp_path, max_tiles=2).max_tiles == 2
    with pytest.raises(CheckpointError, match="can not be cut into 5 to 4 tiles"):
        read_tiling(tmp_path, min_tiles=5)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 448}}')
    with pytest.raises(CheckpointError, match="is not that of tiles"):
        read_tiling(tmp_path)


def test_a_folder_in_opengvlabs_own_layout_says_it_in_its_own_way(tmp_path):
    """Keys of `preprocessor_config.json` and `config.json` of OpenGVLab/InternVL3_5-1B."""
    (tmp_path / "preprocessor_config.json").write_text('{"size": 448, "crop_size": 448, "resample": 3}')
    (tmp_path / "config.json").write_text('{"min_dynamic_patch": 1, "max_dynamic_patch": 6}')
    assert read_tiling(tmp_path) == Tiling(max_tiles=6)
