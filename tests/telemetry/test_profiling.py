"""The profiler records the chosen steps and ranks, and its errors never end a run."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.config.sections import ProfileSection
from mm_core.device import MemoryRecorder
from mm_core.plan import make_plan
from mm_core.telemetry import profiler as profiling
from mm_core.telemetry.profiler import ProfileWindow


def steps(window: ProfileWindow, first: int, last: int) -> None:
    for step in range(first, last + 1):
        window.step_begins(step)
        torch.ones(8, step) @ torch.ones(step, 8)
        window.step_ended(step)


def matmul_shapes(trace: Path) -> list[int]:
    """The inner size of each matmul of a trace: the number of the step that it belongs to."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("name") == "aten::mm"]
    return [event["args"]["Input Dims"][0][1] for event in sorted(found, key=lambda event: event["ts"])]


@pytest.mark.parametrize(
    ("taken", "name", "recorded"),
    [
        ((1, 6), "rank_0_steps_3-5", [3, 4, 5]),
        ((4, 9), "rank_0_steps_4-5", [4, 5]),  # a resumed run
        ((1, 4), "rank_0_steps_3-4", [3, 4]),  # one that ends within the window
    ],
)
def test_the_trace_holds_the_steps_in_its_name(taken, name, recorded, tmp_path):
    window = ProfileWindow(ProfileSection((3, 5)), tmp_path, 0)
    steps(window, *taken)
    window.close()
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {f"{name}.json.gz", f"{name}.txt"}
    assert matmul_shapes(tmp_path / f"profile/{name}.json.gz") == recorded
    table = (tmp_path / f"profile/{name}.txt").read_text()
    assert "aten::mm" in table and "CPU Mem" in table


@pytest.mark.parametrize(
    ("settings", "rank", "taken"),
    [(None, 0, (1, 3)), (ProfileSection((1, 2)), 1, (1, 3)), (ProfileSection((1, 2)), 0, (3, 5))],
)
def test_without_a_window_for_this_rank_and_these_steps_nothing_is_written(settings, rank, taken, tmp_path):
    window = ProfileWindow(settings, tmp_path, rank)
    steps(window, *taken)
    window.close()
    assert not list(tmp_path.iterdir())


def test_every_rank_that_is_named_writes_its_own(tmp_path):
    for rank in (0, 1, 2):
        steps(ProfileWindow(ProfileSection((1, 1), ranks=(0, 2)), tmp_path, rank), 1, 1)
    assert {path.name for path in tmp_path.rglob("*.gz")} == {
        "rank_0_steps_1-1.json.gz",
        "rank_2_steps_1-1.json.gz",
    }


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file stands there")
    with caplog.at_level(logging.WARNING):
        steps(ProfileWindow(ProfileSection((1, 2)), tmp_path, 0), 1, 3)
    assert "the profile could not be written: " in caplog.text


class Allocator:
    """Stands for the memory recorders of torch.cuda and torch_npu: tests run without an accelerator."""

    def __init__(self) -> None:
        self.recording: list[object] = []

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.recording.append(enabled)

    def _dump_snapshot(self, path: str) -> None:
        Path(path).write_bytes(b"snapshot")


@pytest.mark.parametrize("broken", [False, True])
def test_the_allocators_recording_is_written_and_always_ends(broken, tmp_path, monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(profiling, "memory_recorder", lambda: MemoryRecorder(allocator))
    if broken:
        (tmp_path / "profile").write_text("a file stands there")
    steps(ProfileWindow(ProfileSection((1, 2)), tmp_path, 0), 1, 2)
    assert allocator.recording == ["all", None]
    assert broken or (tmp_path / "profile/rank_0_steps_1-2.memory.pickle").read_bytes() == b"snapshot"


def test_memory_false_records_none_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "memory_recorder", lambda: pytest.fail("was asked for"))
    steps(ProfileWindow(ProfileSection((1, 1), memory=False), tmp_path, 0), 1, 1)
    assert "CPU Mem" not in (tmp_path / "profile/rank_0_steps_1-1.txt").read_text()


@pytest.mark.parametrize(("steps", "noted"), [("[8, 9]", False), ("[9, 9]", True)])
def test_the_plan_notes_a_profile_that_begins_after_the_run(tiny, steps, noted):
    notes = make_plan(load_config(tiny, ["train.steps=8", f"profile={{steps: {steps}}}"]), 1).notes
    sentence = "nothing is profiled: profile.steps begins at step 9, and the run ends at step 8"
    assert (sentence in notes) is noted
