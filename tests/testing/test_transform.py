"""The conformance kit of transforms: the shipped one passes, and each check refuses a faulty one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mm_core.data.media.transforms import ResizeCrop
from support.conformance import examined, refusal


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"crop": "random", "flip": 0.5},
        {"crop": [0, 0.5], "interpolation": "area"},
        {"resize": "stretch", "interpolation": "bilinear"},
        {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    ],
)
def test_the_shipped_transform_keeps_its_contract(fields: dict[str, Any]) -> None:
    failed = [(o.check, o.reason) for o in examined("core/resize_crop", tiny=fields) if o.status == "failed"]
    assert failed == []


def changed(change) -> type:
    """A class whose pixels differ from the true ones."""

    def pixels(self, frames, height, width, rng):
        return change(ResizeCrop.pixels(self, frames, height, width, rng), rng)

    return type("Faulty", (ResizeCrop,), {"pixels": pixels})


class Shrunk(ResizeCrop):
    levels = torch.zeros(3, 256)


class Jumping(ResizeCrop):
    def pixels(self, frames, height, width, rng):
        found = super().pixels(frames, height, width, rng)
        return torch.stack([found[:, at].roll(at, -1) for at in range(len(frames))], dim=1)


class InPlace(ResizeCrop):
    def pixels(self, frames, height, width, rng):
        return super().pixels(frames.clamp_(max=100), height, width, rng)


class Counting(ResizeCrop):
    def pixels(self, frames, height, width, rng):
        self.count = getattr(self, "count", 0) + 1
        return super().pixels(frames, height, width, rng).roll(self.count, -1)


class Local(ResizeCrop):
    def __init__(self, **others) -> None:
        super().__init__(**others)
        self.other = lambda pixels: pixels


@pytest.mark.parametrize(
    ("check", "faulty", "message"),
    [
        ("sizes", changed(lambda pixels, _: pixels.float()), "of torch.float32 on cpu"),
        ("sizes", changed(lambda pixels, _: pixels.transpose(0, 1)), "returned [1, 3,"),
        ("sizes", changed(lambda pixels, _: pixels.numpy()), "returned a ndarray"),
        ("one_choice", Jumping, "frames of a still clip become different"),
        ("given_randomness", Counting, "other pixels when it is read again"),
        (
            "no_choices",
            changed(lambda pixels, rng: pixels if rng else pixels.roll(int(torch.randint(0, 9, ())), -1)),
            "without `rng` returns other pixels",
        ),
        ("inputs_unchanged", InPlace, "changes the frames"),
        ("picture", changed(lambda pixels, _: pixels.flip(0)), "not red above"),
        ("picture", changed(lambda pixels, _: pixels.flip(2)), "not red above"),
        ("each_frame", changed(lambda pixels, _: pixels.flip(-1)), "other pixels than pixels"),
        ("levels", Shrunk, "levels are not finite, or do not rise"),
        ("picklable", Local, "pickle"),
    ],
)
def test_each_check_refuses_a_faulty_transform(check: str, faulty: type, message: str) -> None:
    assert message in refusal("core/resize_crop", check, faulty)


def test_a_transform_without_levels_has_nothing_to_check() -> None:
    assert examined("core/resize_crop").run("levels").status == "not applicable"
