"""Resizing, cropping and caption cleaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mm_core.data.media.readers import PyAVReader
from mm_core.data.media.transforms import covering_size, resize_centre_crop
from mm_core.data.rows.captions import clean_caption


@pytest.fixture(scope="module")
def frames(clips: Path) -> torch.Tensor:
    return PyAVReader().read(clips / "bikes.mp4", [0.02, 4.02])  # [2,272,640,3]


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(96, 96), (120, 200), (300, 320)])
def test_resize_and_crop_agree_with_pillow(frames: torch.Tensor, method, size) -> None:
    height, width = size
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    scale = max(height / 272, width / 640)
    tall, wide = round(272 * scale), round(640 * scale)
    top, left = (tall - height) // 2, (wide - width) // 2
    ours = resize_centre_crop(frames, height, width, method)
    assert ours.shape == (3, 2, height, width) and ours.dtype == torch.float32 and ours.is_contiguous()
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame.numpy()).resize((wide, tall), filters[method])
        golden = np.asarray(picture)[top : top + height, left : left + width].astype(np.float32)
        got = ((ours[:, index] + 1) * 127.5).round().permute(1, 2, 0).numpy()
        assert np.abs(got - golden).max() <= 2
        assert np.abs(got - golden).mean() < 0.1


def test_antialiasing_leaves_no_moire() -> None:
    stripes = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255  # finer than the target can show: a mean grey is the only truth
    pixels = resize_centre_crop(stripes, 60, 60)
    assert pixels[..., 5:-5, 5:-5].abs().max() < 0.1


def test_frames_of_the_right_size_pass_unchanged_over_the_whole_range() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    pixels = resize_centre_crop(levels, 16, 16)
    assert pixels.min() == -1 and pixels.max() == 1
    assert torch.equal(((pixels + 1) * 127.5).round().to(torch.uint8)[0, 0], levels[0, ..., 0])


def test_the_crop_is_central() -> None:
    wide = torch.zeros(1, 16, 48, 3, dtype=torch.uint8)
    wide[:, :, 16:32] = 255
    assert torch.equal(resize_centre_crop(wide, 16, 16), torch.ones(3, 1, 16, 16))


def test_the_short_side_fits_and_nothing_falls_short() -> None:
    assert covering_size(720, 1280, 480, 832) == (480, 853)
    assert covering_size(1280, 720, 480, 832) == (1479, 832)
    assert covering_size(9, 16, 480, 832) == (480, 853)
    assert covering_size(333, 333, 7, 5) == (7, 7)


def test_captions_become_one_readable_line() -> None:
    assert clean_caption("  a\tred \n\n circle ") == "a red circle"
    assert clean_caption("Tom &amp;amp; Jerry&nbsp;&lt;3") == "Tom & Jerry <3"
    assert clean_caption("a\x00b\x07c") == "a b c"
    assert clean_caption("一只猫\u3000跑") == "一只猫 跑"
    assert clean_caption("👩‍🚀 waves") == "👩‍🚀 waves", "joiners stay"
    assert clean_caption(" \n") == ""
