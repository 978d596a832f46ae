"""The small files of a checkpoint are parsed once by each rank that goes on from it, and a config is checked
once by each command."""

from __future__ import annotations

from collections import Counter

import pytest

from mm_core.checkpoint import opened
from mm_core.checkpoint.files import facts, layout
from mm_core.cli.main import main
from mm_core.config import load


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """How often each of these ran."""
    found: Counter[str] = Counter()

    def count(module: object, name: str) -> None:
        work = getattr(module, name)

        def counting(*given: object, **named: object) -> object:
            found[name] += 1
            return work(*given, **named)

        monkeypatch.setattr(module, name, counting)

    count(layout, "read_checksums")
    count(opened, "read_metadata")
    count(facts, "read_facts")
    count(facts, "read_manifest")
    count(load, "Checker")
    return found


def test_a_resume_and_each_command_read_once(tiny, tmp_path, counted, capsys):
    words = ["train", "--config", str(tiny), f"run.dir={tmp_path}", "data.loader.workers=0", "train.steps=2"]
    assert main([*words, "lr_schedule.warmup_steps=0"]) == 0
    assert counted == {"Checker": 1}, "a run that begins has no checkpoint to read"
    once = dict.fromkeys(("read_checksums", "read_metadata", "read_facts", "read_manifest", "Checker"), 1)
    run = str(tmp_path / "tiny")
    for command in (
        [*words, "lr_schedule.warmup_steps=0", "train.steps=4"],
        ["sample", "--run", run, "--prompt", "a red circle", "--steps", "1"],
        ["eval", "--run", run, "--split", "train", "--rows", "2"],
        ["export", "--run", run, "--to", "safetensors", "--out", str(tmp_path / "out")],
    ):
        counted.clear()
        assert main(command) == 0, capsys.readouterr().err
        assert counted == once, command[0]
