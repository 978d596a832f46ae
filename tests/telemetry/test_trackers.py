"""Trackers: what they write, what a resume drops, and that a failing tracker does no harm."""

from __future__ import annotations

import json
import logging
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mm_core.contracts import Clip
from mm_core.telemetry.trackers.local import (
    JsonlTracker,
    TensorBoardTracker,
    TrackerSet,
    read_metrics,
    truncate_after,
)


def write(run: Path, steps: range) -> None:
    tracker = JsonlTracker(run)
    for step in steps:
        tracker.log(step, {"loss": 1.0 / step})
    tracker.close("done")


def test_one_line_a_step_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.log(1, {"loss": 0.5, "lr": 1e-5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5, "lr": 1e-05}\n'
    tracker.close("done")


def test_what_is_not_finite_is_valid_json_that_float_reads(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    tracker.close("done")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert math.isnan(float(row["a"])) and float(row["b"]) == math.inf and float(row["c"]) == -math.inf


def test_a_resume_drops_what_lies_beyond_it_and_goes_on(tmp_path):
    write(tmp_path, range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "lo')  # a crash in the middle of a line
    assert truncate_after(tmp_path, 5) == 3
    write(tmp_path, range(6, 8))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert truncate_after(tmp_path, 7) == 0
    assert truncate_after(tmp_path / "absent", 0) == 0
    assert truncate_after(tmp_path, 0) == 7
    assert read_metrics(tmp_path) == []


@contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """Limits files of this process to the size of `path` plus `more` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 5])
def test_metrics_go_on_when_a_full_disk_has_room_again(tmp_path, caplog, room):
    trackers = TrackerSet({"core/jsonl": JsonlTracker(tmp_path)})
    path = tmp_path / "metrics.jsonl"
    trackers.log(1, {"loss": 0.5})
    with caplog.at_level(logging.WARNING):
        with room_for(path, room):  # 5: a line is cut short
            for step in (2, 3, 4):
                trackers.log(step, {"loss": 0.5})
        assert [r.getMessage().partition(": ")[0] for r in caplog.records] == [
            "metrics.jsonl could not be written at step 2; this line is lost, later ones will be tried"
        ]
        trackers.log(5, {"loss": 0.5})
        trackers.log(6, {"loss": 0.5})
        trackers.close("done")
    assert caplog.records[-1].getMessage() == (
        "metrics.jsonl lacks 3 lines (steps 2 to 4) that could not be written; check the disk's free space"
    )
    assert len(caplog.records) == 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 5, 6]
    assert truncate_after(tmp_path, 5) == (1 if room == 0 else 2), "a line that was cut short goes as well"


def scalars(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    for steps, value in ((range(1, 6), 1.0), (range(4, 8), 2.0)):
        tracker = TensorBoardTracker(tmp_path, flush_secs=1)
        for step in steps:
            tracker.log(step, {"loss": value})
        tracker.close("done")
    assert scalars(tmp_path / "tensorboard") == [(1, 1.0), (2, 1.0), (3, 1.0)] + [
        (s, 2.0) for s in (4, 5, 6, 7)
    ]


def test_tensorboard_shows_clips_as_moving_pictures_with_their_prompts(tmp_path):
    import io

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

    fade = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(3, 5, 12, 16)
    clips = [Clip(fade, 8.0, "it gets lighter"), Clip(-fade, 8.0, "it gets darker")]
    tracker = TensorBoardTracker(tmp_path, flush_secs=1)
    tracker.clips(3, clips, tmp_path)
    tracker.log(3, {"loss": 1.0})
    tracker.clips(6, clips[:1], tmp_path)
    tracker.close("done")

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={IMAGES: 0})
    events.Reload()
    assert events.Tags()["images"] == ["samples/000", "samples/001"]
    assert [event.step for event in events.Images("samples/000")] == [3, 6]
    darker = events.Images("samples/001")[0]
    assert (darker.width, darker.height) == (16, 12)
    moving = Image.open(io.BytesIO(darker.encoded_image_string))
    brightness = []
    for frame in range(moving.n_frames):
        moving.seek(frame)
        brightness.append(moving.convert("L").getpixel((4, 4)))
    assert brightness == [255, 191, 128, 64, 0]
    assert events.SummaryMetadata("samples/001").summary_description == "it gets darker"


class Broken:
    """A tracker that fails on every call."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step, metrics) -> None:
        self.calls += 1
        raise ConnectionError("the server is gone")

    def clips(self, step, clips, folder) -> None:
        self.log(step, {})

    def close(self, ending) -> None:
        raise AssertionError("switched off trackers are left alone")


def test_a_tracker_that_fails_is_named_once_and_switched_off(tmp_path, caplog):
    broken = Broken()
    trackers = TrackerSet({"acme/server": broken, "core/jsonl": JsonlTracker(tmp_path)})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(step, {"loss": 1.0})
        trackers.close("done")
    assert [record.getMessage() for record in caplog.records] == [
        "tracker acme/server failed at step 1 and is switched off until the run is resumed: "
        "ConnectionError: the server is gone"
    ]
    assert broken.calls == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_tracker_cannot_change_the_metrics_of_the_others(tmp_path):
    class Clears(Broken):
        def log(self, step, metrics):
            metrics.clear()

    trackers = TrackerSet({"acme/clears": Clears(), "core/jsonl": JsonlTracker(tmp_path)})
    metrics = {"loss": 1.0}
    trackers.log(1, metrics)
    trackers.close("done")
    assert metrics == {"loss": 1.0}
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0]


def test_a_tracker_that_cannot_take_clips_is_switched_off_as_well(tmp_path, caplog):
    broken, works = Broken(), TensorBoardTracker(tmp_path, flush_secs=1)
    trackers = TrackerSet({"acme/server": broken, "core/tensorboard": works})
    clip = Clip(torch.zeros(3, 2, 8, 8), 8.0, "grey")
    with caplog.at_level(logging.WARNING):
        for step in (4, 8):
            trackers.clips(step, [clip], tmp_path)
        trackers.close("done")
    assert "tracker acme/server failed at step 4 and is switched off" in caplog.text
    assert broken.calls == 1 and len(caplog.records) == 1


def test_a_tracker_that_cannot_close_does_not_end_the_run(tmp_path, caplog):
    class Stuck(JsonlTracker):
        def close(self, ending) -> None:
            super().close(ending)
            raise OSError("disk full")

    with caplog.at_level(logging.WARNING):
        TrackerSet({"acme/stuck": Stuck(tmp_path)}).close("done")
    assert (
        "tracker acme/stuck could not be closed and may lack the last metrics (see metrics.jsonl): "
        "OSError: disk full"
    ) in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tensorboard_takes_what_is_not_finite(tmp_path, value):
    tracker = TensorBoardTracker(tmp_path, flush_secs=1)
    tracker.log(1, {"loss": value})
    tracker.close("done")
    assert str(scalars(tmp_path / "tensorboard")[0][1]) == str(value)
