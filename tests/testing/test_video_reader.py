"""The conformance kit of video readers: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from torch import Tensor

from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from mm_core.testing.data.video_readers import KIT
from support.conformance import examined, refusal, shortcomings


@pytest.mark.parametrize("name", ["core/pyav", "core/decord", "core/torchcodec"])
def test_shipped_readers_keep_their_contract(name: str) -> None:
    assert shortcomings(name) == []


def test_a_known_failure_is_expected() -> None:
    outcome = examined("core/decord").run("bit_rot")
    assert outcome.status in ("expected", "not applicable")
    assert outcome.reason.startswith(
        ("decord 0.6 returns what its decoder makes of damaged frames", "the config")
    )


class Missing(PyAVReader):
    """A reader whose package is not installed."""

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        try:
            import no_such_package  # noqa: F401
        except ImportError:
            raise DataError("the package no_such_package is not installed") from None
        return super().read(path, seconds)


def test_a_missing_package_is_no_failure() -> None:
    statuses = {o.check: o for o in examined("core/pyav", Missing)}
    assert statuses["frames"].status == "not applicable"
    assert statuses["frames"].reason == "the package no_such_package is not installed"
    assert [o.reason for o in statuses.values() if o.status == "failed"] == []


def reading(change) -> type:
    """A class whose read differs from the true one."""

    def read(self, path, seconds):
        return change(lambda times, place=path: PyAVReader.read(self, place, times), list(seconds))

    return type("Faulty", (PyAVReader,), {"read": read})


class Disordered(PyAVReader):
    def stream(self, path, choose):
        places, frames = zip(*super().stream(path, choose), strict=True)
        return zip(sorted(places), frames, strict=True)


class Misdescribed(PyAVReader):
    def stream(self, path, choose):
        return super().stream(path, lambda info: choose(replace(info, fps=1.0)))


class Listing(PyAVReader):
    """It keeps the first file open."""

    def read(self, path, seconds):
        self.first = getattr(self, "first", path)
        return super().read(self.first, seconds)


class Open(PyAVReader):
    def read(self, path, seconds):
        self.container = av.open(str(path.absolute()))
        return super().read(path, seconds)


class Keyframes(PyAVReader):
    """It reads what FFmpeg makes of a file, damaged or not."""

    def read(self, path, seconds):
        try:
            return super().read(path, seconds)
        except DataError:
            if not path.is_file() or not path.stat().st_size:
                raise
            return torch.zeros(len(seconds), 32, 64, 3, dtype=torch.uint8)


class Bare(PyAVReader):
    """It raises the errors of FFmpeg."""

    def probe(self, path):
        with av.open(str(path.absolute())):
            return super().probe(path)


class Header(PyAVReader):
    def probe(self, path):
        info = super().probe(path)
        return replace(info, width=info.height, height=info.width)


class Late(PyAVReader):
    def read(self, path, seconds):
        last = super().probe(path).duration - 0.01
        return super().read(path, [min(time, last) for time in seconds])


FAULTS = [
    ("header", Header, "probe returned VideoInfo(width=32, height=64, fps=8.0, num_frames=20, duration=2.5)"),
    (
        "frames",
        reading(lambda read, times: read(times).float()),
        "read returned [2, 32, 64, 3] of torch.float32 on cpu",
    ),
    ("frames", reading(lambda read, times: read(times).permute(0, 3, 1, 2)), "read returned [2, 3, 32, 64]"),
    ("frames", reading(lambda read, times: read(times).flip(-1)), "the top left corner is read as ["),
    ("frames", reading(lambda read, times: read(times).flip(1)), "the top left corner is read as ["),
    (
        "times",
        reading(lambda read, times: read(sorted(times))),
        "at 0.1 of their duration, frames [17, 2, 9, 2] are read as [2, 2, 9, 17]",
    ),
    (
        "times",
        reading(lambda read, times: read([min(round(time * 8) + 0.5, 19.5) / 8 for time in times])),
        "at 0.9 of their duration, frames [0] are read as [1]",
    ),
    (
        "same_reader",
        Listing,
        "the same frame is read differently after another file|a second file is read as",
    ),
    ("streamed", Disordered, "stream gives other frames than read for the frames [9, 2, 9]"),
    ("streamed", Misdescribed, "stream describes the clip as probe does not"),
    ("beyond_the_end", Late, "read of a clip that ends at 2.5 s, at 3.0 s, raises no error"),
    ("missing_file", Bare, "probe of a file that does not exist raises FileNotFoundError"),
    ("no_video", Bare, "probe of an empty file raises InvalidDataError"),
    ("no_video", Keyframes, "read of a text raises no error"),
    ("bit_rot", Keyframes, "read of a video with a damaged frame raises no error"),
    ("picklable", Open, "the reader cannot be sent to data workers: "),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(check: str, faulty: type, sentence: str) -> None:
    reason = refusal("core/pyav", check, faulty)
    assert any(part in reason for part in sentence.split("|")), reason


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(KIT.checks)
