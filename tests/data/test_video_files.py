"""Clips as files and previews: names, speed, colours and sizes."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from mm_core.contracts import Clip, Randomness
from mm_core.data.media.images import read_image
from mm_core.data.media.video_files import (
    clip_name,
    from_bytes,
    gif_bytes,
    make_folder,
    preview,
    to_bytes,
    write_clips,
)
from mm_core.errors import DataError


def moving(frames: int = 6, side: int = 16) -> torch.Tensor:
    """A white square on blue that moves to the right."""
    pixels = torch.full((3, frames, side, side), -1.0)
    pixels[2] = 0.5
    for frame in range(frames):
        pixels[:, frame, 4:8, frame : frame + 4] = 1.0
    return pixels


@pytest.mark.parametrize(("fps", "total"), [(16.0, 375), (8.0, 750), (24.0, 250), (100.0, 120)])
def test_a_gif_holds_every_frame_at_the_clips_speed(fps, total):
    clip = Clip(moving(), fps, "x")
    image = Image.open(io.BytesIO(gif_bytes(clip)))
    frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    assert np.abs(np.stack(frames).astype(int) - to_bytes(clip)).max() <= 2
    durations = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    assert abs(sum(durations) - total) <= 5  # hundredths of a second, and two of them at least
    assert image.info["loop"] == 0


def test_a_gif_of_one_frame_is_one_too():
    assert Image.open(io.BytesIO(gif_bytes(Clip(moving(1), 8.0, "still")))).size == (16, 16)


def test_a_preview_is_the_mean_of_what_it_stands_for_and_small_clips_stay():
    clip = Clip(Randomness(1).normal((3, 2, 128, 512), "x").clamp(-1, 1), 8.0, "wide")
    small = preview(clip)
    assert small.pixels.shape == (3, 2, 64, 256) and (small.fps, small.prompt) == (8.0, "wide")
    expected = clip.pixels.view(3, 2, 64, 2, 256, 2).mean((3, 5))
    torch.testing.assert_close(small.pixels, expected, rtol=0, atol=1e-6)
    assert preview(small) is small
    assert preview(Clip(torch.zeros(3, 1, 1, 4000), 8.0, "")).pixels.shape == (3, 1, 1, 256)


def test_bytes_and_back_lose_less_than_half_a_level():
    pixels = Randomness(1).normal((3, 4, 5, 6), "x").clamp(-1, 1)
    again = from_bytes(to_bytes(Clip(pixels, 8.0, "")))
    torch.testing.assert_close(again, pixels, rtol=0, atol=0.501 / 127.5)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red circle, moving left!", "007-a-red-circle-moving-left.mp4"),
        ("../../etc/passwd", "007-etc-passwd.mp4"),
        ("一只猫 睡觉", "007-一只猫-睡觉.mp4"),
        ("!?", "007.mp4"),
        ("x" * 90, f"007-{'x' * 60}.mp4"),
    ],
)
def test_a_file_is_named_after_its_prompt_and_stays_in_its_folder(prompt, name):
    assert clip_name(7, Clip(torch.zeros(3, 2, 4, 4), 8.0, prompt)) == name


def test_one_frame_is_a_png_with_the_very_pixels(tmp_path):
    clip = Clip(Randomness(1).normal((3, 1, 5, 7), "x").clamp(-1, 1), 8.0, "a cat")
    sheet = write_clips([clip], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"000-a-cat.png", "prompts.json", sheet.name}
    assert read_image(tmp_path / "000-a-cat.png").permute(1, 2, 0).equal(torch.from_numpy(to_bytes(clip)[0]))


def test_a_folder_that_cannot_be_made_is_a_readable_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the folder cannot be created: Not a directory"):
        make_folder(tmp_path / "file" / "below")
