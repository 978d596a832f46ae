"""Checkpoints at the edges where one more or one less changes what happens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.files import layout
from mm_core.checkpoint.files.facts import step_of
from mm_core.checkpoint.files.tensor_files import write_file
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import checkpoint_at, open_checkpoint
from mm_core.checkpoint.resume_check import check_resume
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError

STATE = {"model": {"net.weight": torch.arange(6.0)}, "optimizer": {"net.weight.exp_avg": torch.ones(6)}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4; the first is the best."""
    store = CheckpointStore(tmp_path / "run", keep=9, best="loss")
    for step, loss in ((2, 1.0), (4, 2.0)):
        store.save(step, STATE, {"seed": 1, "metrics": {"loss": loss}}, "run: {name: test}\n")
    store.close()
    return tmp_path / "run"


@pytest.mark.parametrize(("mark", "step"), [("@2", 2), ("@4", 4), ("@best", 2), ("@latest", 4), ("", 4)])
def test_a_step_the_best_and_the_newest_are_found_by_their_mark(run: Path, mark: str, step: int) -> None:
    assert open_checkpoint(checkpoint_at(f"{run}{mark}")).facts["step"] == step


@pytest.mark.parametrize("mark", ["3", "x", "-2"])
def test_a_step_that_is_not_there_lists_those_that_are(run: Path, mark: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint_at(f"{run}@{mark}")
    assert caught.value.what == f"this run has no complete checkpoint {mark!r}"
    assert caught.value.accepted == "2, 4, best, latest"


def test_the_parts_of_a_checkpoint(run: Path) -> None:
    assert open_checkpoint(run).parts == {"model", "optimizer"}
    assert open_checkpoint(run).names("optimizer") == {"net.weight.exp_avg"}
    assert isinstance(open_checkpoint(run), OpenedCheckpoint)


def test_names_of_checkpoints_are_on_disk_before_a_save_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def noted(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    store = CheckpointStore(tmp_path / "run", keep=9, best="loss")
    store.save(2, STATE, {"seed": 1, "metrics": {"loss": 1.0}}, "run: {name: test}\n")
    store.close()
    for name in ("LATEST", "BEST"):
        (at,) = [index for index, file in enumerate(synced) if file.startswith(f".{name}.tmp-")]
        assert "checkpoints" in synced[at + 1 :], f"the folder is synced after {name} has been replaced"


def test_a_json_file_of_33_mebibytes_is_read_and_one_of_more_than_64_is_refused(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(" " * (33 << 20) + '{"seed": 1}')
    assert layout.read_json(tmp_path / "facts.json") == {"seed": 1}
    (tmp_path / "facts.json").write_text(" " * (64 << 20) + '{"seed": 1}')
    with pytest.raises(CheckpointError, match=r"cannot be read \(ValueError\)"):
        layout.read_json(tmp_path / "facts.json")


@pytest.mark.parametrize(("levels", "read"), [(128, True), (129, False)])
def test_a_json_file_of_128_levels_is_read_and_a_deeper_one_is_refused(
    tmp_path: Path, levels: int, read: bool
) -> None:
    nested: object = {}
    for _ in range(levels):
        nested = {"in": nested}
    (tmp_path / "facts.json").write_text(json.dumps(nested))
    if read:
        assert layout.read_json(tmp_path / "facts.json") == nested
    else:
        with pytest.raises(CheckpointError, match=r"cannot be read \(RecursionError\)"):
            layout.read_json(tmp_path / "facts.json")


@pytest.mark.parametrize(
    ("name", "step"), [("step_00000007", 7), ("step_0000000007", None), ("step_123456789", 123456789)]
)
def test_a_folder_has_a_step_only_under_the_name_that_a_save_gives(name: str, step: int | None) -> None:
    assert step_of(Path(name)) == step


def test_the_newest_of_later_checkpoints_is_named(run: Path) -> None:
    with pytest.raises(CheckpointError, match="from step 1, but its folder holds checkpoints up to step 4\n"):
        CheckpointStore(run, keep=9).begin(1)


class Noted:
    """In the place of a fingerprint: where the tensor lies that is written."""

    def check(self, held: torch.Tensor, checkpoint: str) -> None:
        self.place = held.data_ptr()


def test_a_whole_tensor_is_written_without_a_copy_and_a_view_without_the_rest(tmp_path: Path) -> None:
    whole = torch.arange(1 << 16, dtype=torch.float32)
    first, second = Noted(), Noted()
    write_file(tmp_path / "whole", [whole], [first])  # type: ignore[list-item]
    assert first.place == whole.data_ptr()
    write_file(tmp_path / "view", [whole[:4]], [second])  # type: ignore[list-item]
    assert second.place != whole.data_ptr()
    assert (tmp_path / "view").stat().st_size < 4096
    assert torch.equal(torch.load(tmp_path / "view"), whole[:4])
    write_file(tmp_path / "unchecked", [whole])
    assert torch.equal(torch.load(tmp_path / "unchecked"), whole)


@pytest.mark.parametrize(("length", "shown"), [(40, "a" * 40), (41, "a" * 37 + "...")])
def test_forty_characters_of_a_changed_value_are_shown(length: int, shown: str) -> None:
    before, after = ({"config": {"run": {"name": name}}} for name in ("b", "a" * length))
    lines = check_resume(before, after, ("all",))
    assert any(f"-> {shown}  " in line for line in lines), lines
