"""Resizing, cropping and caption cleaning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_core.builtin.configs.data import ResizeCropConfig, VideoTextConfig
from mm_core.contracts import Randomness, SampleKey, VideoInfo, VideoTextBatch
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.frames import clip_times
from mm_core.data.media.readers import PyAVReader
from mm_core.data.media.transforms import ResizeCrop, covering_size, read_pixels
from mm_core.data.rows.captions import clean_caption
from mm_core.errors import ContractError, DataError
from mm_core.schema.fields import ComponentConfig

CPU = torch.device("cpu")


def resize_centre_crop(
    frames: torch.Tensor, height: int, width: int, method: Any = "bicubic"
) -> torch.Tensor:
    return ResizeCrop(interpolation=method).pixels(frames, height, width, None)


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
    assert ours.shape == (3, 2, height, width) and ours.dtype == torch.uint8 and ours.is_contiguous()
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame.numpy()).resize((wide, tall), filters[method])
        golden = np.asarray(picture)[top : top + height, left : left + width].astype(np.float32)
        got = ours[:, index].float().permute(1, 2, 0).numpy()
        assert np.abs(got - golden).max() <= 2
        assert np.abs(got - golden).mean() < 0.1


def test_antialiasing_leaves_no_moire() -> None:
    stripes = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255  # finer than the target can show: a mean grey is the only truth
    pixels = resize_centre_crop(stripes, 60, 60)
    assert (pixels[..., 5:-5, 5:-5].float() - 127.5).abs().max() < 12


def test_frames_of_the_right_size_pass_unchanged_over_the_whole_range() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    pixels = resize_centre_crop(levels, 16, 16)
    assert torch.equal(pixels[0, 0], levels[0, ..., 0])


def test_the_crop_is_central() -> None:
    wide = torch.zeros(1, 16, 48, 3, dtype=torch.uint8)
    wide[:, :, 16:32] = 255
    assert torch.equal(resize_centre_crop(wide, 16, 16), torch.full((3, 1, 16, 16), 255, dtype=torch.uint8))


def test_the_short_side_fits_and_nothing_falls_short() -> None:
    assert covering_size(720, 1280, 480, 832) == (480, 853)
    assert covering_size(1280, 720, 480, 832) == (1479, 832)
    assert covering_size(9, 16, 480, 832) == (480, 853)
    assert covering_size(333, 333, 7, 5) == (7, 7)


# -- resize_crop -----------------------------------------------------------------------------------


def noise(height: int = 30, width: int = 50, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def drawn(draw: int) -> Randomness:
    return Randomness(7).at("data", 0, draw)


def test_area_takes_the_mean_of_what_a_pixel_covers() -> None:
    frames = noise(32, 48)
    got = ResizeCrop(interpolation="area").pixels(frames, 8, 12, None)
    wanted = frames.float().reshape(3, 8, 4, 12, 4, 3).mean((2, 4)).permute(3, 0, 1, 2).round()
    assert torch.equal(got.float(), wanted)


def test_stretch_uses_the_whole_frame() -> None:
    frames = torch.zeros(1, 16, 64, 3, dtype=torch.uint8)
    frames[:, :, 32:] = 200
    got = ResizeCrop(resize="stretch", interpolation="area").pixels(frames, 16, 16, None)
    assert got[..., :8].max() == 0 and got[..., 8:].min() == 200


def test_exact_crops_and_never_resizes() -> None:
    frames = noise()
    got = ResizeCrop(resize="exact").pixels(frames, 16, 16, None)
    assert torch.equal(got.permute(1, 2, 3, 0), frames[:, 7:23, 17:33])
    with pytest.raises(DataError, match="the frames of 30 x 50 are smaller than 32 x 16") as fault:
        ResizeCrop(resize="exact").pixels(frames, 32, 16, None)
    assert "short_side" in fault.value.hint


@pytest.mark.parametrize(("crop", "rows"), [((0, 0.5), slice(0, 16)), ((1, 0), slice(14, 30))])
def test_a_fixed_crop_keeps_its_part(crop: tuple[float, float], rows: slice) -> None:
    frames = noise(30, 16)
    got = ResizeCrop(resize="exact", crop=crop).pixels(frames, 16, 16, drawn(3))
    assert torch.equal(got.permute(1, 2, 3, 0), frames[:, rows])


def test_random_crops_are_equally_likely_and_the_same_for_all_frames() -> None:
    frames = torch.arange(8, dtype=torch.uint8)[None, :, None, None].expand(3, 8, 16, 3).contiguous()
    transform = ResizeCrop(resize="exact", crop="random")
    first = []
    for draw in range(400):
        got = transform.pixels(frames, 5, 16, drawn(draw))
        assert torch.equal(got[:, 0], got[:, 2])
        first.append(int(got[0, 0, 0, 0]))
    counts = np.bincount(first, minlength=4)
    assert len(counts) == 4 and counts.min() > 70, "0 to 3 rows above, each about 100 times"
    assert torch.equal(transform.pixels(frames, 5, 16, None)[0, 0, :, 0], torch.arange(1, 6).byte()), "centre"


def test_flips_mirror_their_share_and_none_in_validation() -> None:
    frames = noise(16, 16)
    plain = ResizeCrop().pixels(frames, 16, 16, None)
    transform = ResizeCrop(flip=0.25)
    flipped = 0
    for draw in range(400):
        got = transform.pixels(frames, 16, 16, drawn(draw))
        flipped += torch.equal(got, plain.flip(-1))
        assert torch.equal(got, plain) or torch.equal(got, plain.flip(-1))
    assert 70 < flipped < 130
    assert torch.equal(ResizeCrop(flip=1.0).pixels(frames, 16, 16, None), plain)


def test_std_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="three numbers above 0"):
        ResizeCropConfig(std=(0.5, 0.0, 0.5))


def test_what_a_subclass_changes_is_used(clips: Path, annotate, tmp_path: Path) -> None:
    class Bright(PyAVReader):
        def read(self, path, seconds):
            return torch.full_like(super().read(path, seconds), 200)

    class Mirrored(ResizeCrop):
        def pixels(self, frames, height, width, rng):
            return super().pixels(frames, height, width, rng).flip(-1)

    rows = annotate(tmp_path / "rows.json", [{"path": "bikes.mp4", "cap": "a"}])
    plain, bright, mirrored = (
        VideoTextDataset(rows, 2, 16, 24, folder=str(clips), **options)[0]["pixels"]
        for options in ({}, {"reader": Bright()}, {"transform": Mirrored()})
    )
    assert bright.unique().tolist() == [200]
    assert torch.equal(mirrored, plain.flip(-1)) and not torch.equal(mirrored, plain)


@pytest.mark.parametrize("start", [0.0, 0.9])
def test_frames_resized_as_they_are_decoded_are_those_of_the_whole_clip(clips: Path, start: float) -> None:
    reader, transform, path = PyAVReader(), ResizeCrop(crop="random"), clips / "bikes.mp4"

    def times(info: VideoInfo) -> list[float]:
        return clip_times(info, path, 9, 12.0, start)

    got, info = read_pixels(reader, transform, path, times, (96, 160), drawn(1))
    whole = reader.read(path, times(reader.probe(path)))
    assert info == reader.probe(path) and len(whole) == 9
    assert torch.equal(got, transform.pixels(whole, 96, 160, drawn(1)))


class FloatSteps(ResizeCrop):
    def frame_by_frame(self, source, height, width, rng):
        one = super().frame_by_frame(source, height, width, rng)
        return lambda frame: one(frame) / 127.5 - 1


class GreySteps(ResizeCrop):
    def frame_by_frame(self, source, height, width, rng):
        one = super().frame_by_frame(source, height, width, rng)
        return lambda frame: one(frame)[:1]


class FloatStream(PyAVReader):
    def stream(self, path, choose):
        return ((place, frame / 255) for place, frame in super().stream(path, choose))


class ShortStream(PyAVReader):
    def stream(self, path, choose):
        return ((place, frame) for place, frame in super().stream(path, choose) if place != 1)


class EmptyStream(PyAVReader):
    def stream(self, path, choose):
        return (each for each in super().stream(path, choose) if False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": FloatSteps()}, r"the function of frame_by_frame returned torch.float32 \[3, 16, 24\]"),
        ({"transform": GreySteps()}, r"the function of frame_by_frame returned torch.uint8 \[1, 16, 24\]"),
        ({"reader": FloatStream()}, r"stream returned torch.float32 \[272, 640, 3\]"),
        ({"reader": ShortStream()}, "stream returned no frame for 1 time"),
        ({"reader": EmptyStream()}, "stream returned no frame"),
    ],
)
def test_a_wrong_step_of_a_stream_is_its_author_s_fault(
    clips: Path, annotate, tmp_path, options, message
) -> None:
    rows = annotate(tmp_path / "rows.json", [{"path": "bikes.mp4", "cap": "a"}])
    data = VideoTextDataset(rows, 2, 16, 24, folder=str(clips), **options)
    with pytest.raises(ContractError, match=message) as fault:
        data[0]
    assert __file__ in str(fault.value.where)


def test_a_reader_that_hands_its_calls_on_is_read_as_a_whole(clips: Path, annotate, tmp_path: Path) -> None:
    class Proxy:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

    rows = annotate(tmp_path / "rows.json", [{"path": "bikes.mp4", "cap": "a"}])
    plain = VideoTextDataset(rows, 2, 16, 24, folder=str(clips))[0]["pixels"]
    for options in ({"reader": Proxy(PyAVReader())}, {"transform": Proxy(ResizeCrop())}):
        assert torch.equal(
            VideoTextDataset(rows, 2, 16, 24, folder=str(clips), **options)[0]["pixels"], plain
        )


def test_two_places_for_the_interpolation_are_refused() -> None:
    transform = ComponentConfig("transform", "core/resize_crop")
    with pytest.raises(ValueError, match="set it in the transform"):
        VideoTextConfig("rows.json", 2, 16, 24, interpolation="area", transform=transform)


# -- levels on the device --------------------------------------------------------------------------


def batch_of(pixels: torch.Tensor, levels: torch.Tensor | None = None) -> VideoTextBatch:
    rows = len(pixels)
    return VideoTextBatch(
        [SampleKey(0, 0)] * rows, torch.ones(rows), ["a"] * rows, pixels, ["a"] * rows, levels=levels
    )


def test_levels_become_the_floats_that_workers_made_before() -> None:
    """Bit-equal to a division by 127.5, which a device would turn into a multiplication."""
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 1, 16, 16).expand(2, 3, 1, 16, 16)
    moved = batch_of(levels.contiguous()).to(CPU)
    assert moved.pixels is not None and moved.pixels.dtype == torch.float32
    assert torch.equal(moved.pixels, levels.float().div(127.5).sub(1.0))
    assert not torch.equal(moved.pixels, levels.float() * (1 / 127.5) - 1), "this is what a table avoids"
    floats = torch.rand(1, 3, 1, 4, 4)
    assert torch.equal(batch_of(floats).to(CPU).pixels, floats)


def test_mean_and_std_go_with_the_batch(clips: Path, annotate: Callable[..., Path], tmp_path: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as CLIP-like encoders use them
    rows = annotate(tmp_path / "rows.json", [{"path": "bikes.mp4", "cap": "a"}])
    transform = ResizeCrop(mean=mean, std=std)
    data = VideoTextDataset(rows, 2, 16, 24, folder=str(clips), transform=transform)
    sample = data[0]
    batch = data.collate([sample | {"key": SampleKey(0, 0), "weight": 1.0}])
    assert batch.levels is not None and batch.pixels is not None and batch.pixels.dtype == torch.uint8
    wanted = (sample["pixels"].float() / 255 - torch.tensor(mean)[:, None, None, None]) / torch.tensor(std)[
        :, None, None, None
    ]
    moved = batch.to(CPU)
    assert moved.levels is None
    torch.testing.assert_close(moved.pixels, wanted[None], rtol=1e-6, atol=1e-6)


def test_a_transform_of_another_shape_is_its_author_s_fault(clips: Path, annotate, tmp_path: Path) -> None:
    class Floats:
        def pixels(self, frames, height, width, rng):
            return ResizeCrop().pixels(frames, height, width, rng).float()

    rows = annotate(tmp_path / "rows.json", [{"path": "bikes.mp4", "cap": "a"}])
    data = VideoTextDataset(rows, 2, 16, 24, folder=str(clips), transform=Floats())
    with pytest.raises(ContractError, match=r"pixels returned torch.float32 \[3, 2, 16, 24\]") as fault:
        data[0]
    assert __file__ in str(fault.value.where)

    class Sideways(ResizeCrop):
        levels = torch.zeros(256, 3)

    data = VideoTextDataset(rows, 2, 16, 24, folder=str(clips), transform=Sideways())
    with pytest.raises(ContractError, match=r"levels returned torch.float32 \[256, 3\]"):
        data.collate([data[0] | {"key": SampleKey(0, 0), "weight": 1.0}])
    small = VideoTextDataset(rows, 2, 999, 24, folder=str(clips), transform=ResizeCrop(resize="exact"))
    with pytest.raises(DataError, match="smaller than 999 x 24") as refused:
        small[0]
    assert "bikes.mp4" in str(refused.value.where), "the skip ledger names the file"


def test_captions_become_one_readable_line() -> None:
    assert clean_caption("  a\tred \n\n circle ") == "a red circle"
    assert clean_caption("Tom &amp;amp; Jerry&nbsp;&lt;3") == "Tom & Jerry <3"
    assert clean_caption("a\x00b\x07c") == "a b c"
    assert clean_caption("一只猫\u3000跑") == "一只猫 跑"
    assert clean_caption("👩‍🚀 waves") == "👩‍🚀 waves", "joiners stay"
    assert clean_caption(" \n") == ""
