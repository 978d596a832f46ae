"""Images as frames: read upright and in colour, brought to a clip's size as Pillow does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mm_core.data.media.images import fit_image, read_image
from mm_core.errors import DataError


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_pixels_of_a_file(tmp_path: Path) -> None:
    Image.fromarray(picture(5, 7)).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png")
    assert image.dtype == torch.uint8 and image.is_contiguous()
    assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(picture(5, 7)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_other_colours_become_rgb(tmp_path: Path, mode: str) -> None:
    source = Image.fromarray(picture(5, 7)).convert(mode)
    source.save(tmp_path / "a.png")
    expected = torch.from_numpy(np.asarray(source.convert("RGB")).copy())
    assert torch.equal(read_image(tmp_path / "a.png").permute(1, 2, 0), expected)


@pytest.mark.parametrize(("name", "dtype"), [("a.png", "<u2"), ("a.tiff", ">u2"), ("b.tiff", "<i4")])
def test_shades_of_16_bits_keep_their_upper_eight(tmp_path: Path, name: str, dtype: str) -> None:
    shades = np.array([[0, 255, 256, 1000, 32768, 65535]])
    Image.fromarray(shades.astype(dtype)).save(tmp_path / name)
    assert read_image(tmp_path / name).tolist() == [[[0, 0, 1, 3, 128, 255]]] * 3


@pytest.mark.parametrize("numbers", [np.full((2, 2), 0.5, np.float32), np.full((2, 2), -1, np.int32)])
def test_numbers_that_are_no_shades_are_a_readable_error(tmp_path: Path, numbers: np.ndarray) -> None:
    Image.fromarray(numbers).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"its pixels .Pillow's mode [IF]. are not shades of"):
        read_image(tmp_path / "a.tiff")


def test_a_turned_camera_is_turned_back(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    Image.fromarray(picture(5, 7)).save(tmp_path / "a.png", exif=exif)
    image = read_image(tmp_path / "a.png")
    assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(np.rot90(picture(5, 7), -1).copy()))


def test_an_image_is_stretched_by_lanczos() -> None:
    image = torch.from_numpy(picture(20, 30)).permute(2, 0, 1)
    resized = Image.fromarray(picture(20, 30)).resize((8, 16), Image.Resampling.LANCZOS)
    expected = torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(fit_image(image, 16, 8), expected, rtol=0, atol=1e-6)
    same = fit_image(image, 20, 30)
    torch.testing.assert_close(same, image.float() / 127.5 - 1, rtol=0, atol=1e-6)
    assert same.dtype == torch.float32 and same.min() >= -1 and same.max() <= 1


def test_what_is_no_image_is_a_readable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(DataError, match="the image cannot be read: cannot identify image file") as caught:
        read_image(tmp_path / "a.png")
    assert str(tmp_path / "a.png") in str(caught.value)
    with pytest.raises(DataError, match="there is no such image"):
        read_image(tmp_path / "b.png")
    Image.fromarray(picture(40, 40)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    with pytest.raises(DataError, match=r"the image cannot be read: .*truncated"):
        read_image(tmp_path / "cut.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="the image of 1,600 pixels is larger than Pillow opens"):
        read_image(tmp_path / "whole.png")
