"""A disk that is full when a run begins or ends: /dev/full lies where a file is to be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_core.cli.main import main
from support.checkpoints import staged

FULL = "[Errno 28] No space left on device"


def train(tiny, folder: Path, *overrides: str) -> int:
    steps = ("train.steps=2", "lr_schedule={type: constant}", "data.loader.workers=0")
    return main(["train", "--config", str(tiny), f"run.dir={folder}", *steps, *overrides])


@pytest.fixture
def run(tmp_path) -> Path:
    run = tmp_path / "tiny"
    run.mkdir()
    return run


def test_a_picture_that_finds_no_room_is_a_warning(tiny, run, tmp_path, caplog):
    staged(run / "loss.png").symlink_to("/dev/full")
    assert train(tiny, tmp_path) == 0
    assert f"loss.png could not be completed: OSError: {FULL}" in caplog.messages
    assert (run / "checkpoints/step_00000002/checksums.json").exists()
    assert not (run / "loss.png").exists() and not staged(run / "loss.png").is_symlink()


def test_nor_does_it_hide_the_error_that_ended_the_run(tiny, run, tmp_path, capsys):
    staged(run / "loss.png").symlink_to("/dev/full")
    plugin = tmp_path / "failing.py"
    plugin.write_text(
        "from mm_core import Component, hookimpl\n"
        "from mm_core.contracts import Callback\n"
        "@hookimpl\n"
        "def mm_callbacks():\n"
        "    return [Component(name='failing', target='failing:Failing')]\n"
        "class Failing(Callback):\n"
        "    def step_ended(self, step, metrics):\n"
        "        raise KeyError('what ended it')\n"
    )
    assert train(tiny, tmp_path, f"plugins.path=[{plugin}]", "callbacks=[{type: local/failing}]") == 1
    said = capsys.readouterr().err
    place = f"callbacks, {plugin}, line 8"
    assert (
        f"mm: error: {place}: callback local/failing raised KeyError at step_ended: 'what ended it'" in said
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
def test_a_run_that_cannot_write_down_what_it_is_reports_it(name, tiny, run, tmp_path, capsys):
    staged(run / name).symlink_to("/dev/full")
    assert train(tiny, tmp_path) == 1
    said = capsys.readouterr().err
    assert f"mm: error: writing config.yaml and manifest.json failed: {FULL}" in said
    assert "hint: check free space, quota and permissions of the run folder" in said
    assert "Traceback" not in said


def test_nor_does_one_begin_that_cannot_log(tiny, run, tmp_path, capsys):
    rows = [{"step": 0, "loss": 1.0}, {"step": 5, "loss": 0.5}]  # the second is to go
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged(run / "metrics.jsonl").symlink_to("/dev/full")
    assert train(tiny, tmp_path) == 1
    said = capsys.readouterr().err
    assert f"mm: error: opening metrics.jsonl failed: {FULL}" in said and "Traceback" not in said
