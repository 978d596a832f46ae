"""Several real ranks save and load together: resharding, agreement on faults, no copy written twice."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.store import CheckpointStore
from support.checkpoints import make_state
from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


def run(world: int, folder: Path, case: str) -> list[dict]:
    return spoken(run_ranks(SCRIPT, world, folder, 0, case))


def spoken(outputs: list[str]) -> list[dict]:
    lines = [next(line for line in text.splitlines() if line.startswith("SAID ")) for text in outputs]
    return [json.loads(line.removeprefix("SAID ")) for line in lines]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run that one process without a group began and two ranks went on with."""
    folder = tmp_path_factory.mktemp("two") / "run"
    CheckpointStore(folder, keep=2).save(10, make_state(0), {}, "x: 1\n")
    return folder, run(2, folder, "two")


@pytest.mark.slow
def test_two_ranks_load_what_one_process_saved(two):
    assert [said["loaded what another world saved"] for said in two[1]] == [True, True]


@pytest.mark.slow
def test_a_fault_on_one_rank_is_one_error_on_all(two):
    folder, (first, second) = two
    store = folder / "checkpoints"
    assert first == second, "both ranks say the same of everything"
    assert first["a full disk on rank 1"] == (
        "rank 1: writing the checkpoint failed: [Errno 27] File too large\n"
        "  hint: check free space, quota and permissions of the run folder, on every node"
    )
    assert first["left behind"] == ["LATEST", "step_00000010", "step_00000020"]
    assert first["the last good one"] == [0, 20, True]
    assert first["saved again"].startswith(
        f"rank 0, {store}/step_00000020: this step already has a checkpoint, and checkpoints are never"
        " overwritten\n"
    )
    assert first["a flipped bit"] in {
        f"rank {rank}, {store}/step_00000022: this checkpoint is damaged: __1_0.distcp does not match its "
        "checksum\n  hint: resume from another checkpoint: --resume PATH"
        for rank in (0, 1)
    }
    assert (
        "4 unexpected: model.blocks.0.bias, model.head, optimizer.blocks.0.weight.exp_avg, "
        "optimizer.blocks.0.weight.step; 1 misshapen: model.blocks.0.weight (7x5 float32 in the checkpoint, "
        "7x6 float32 in the model)" in first["another model"]
    )
    assert first["two minds"] == (
        f"the ranks would load different checkpoints: {store}/step_00000020, {store}/step_00000022\n"
        "  hint: start all ranks with the same --resume, on a file system that all nodes share"
    )


@pytest.mark.slow
def test_one_process_loads_what_two_ranks_saved(two, state, empty, same):
    store = CheckpointStore(two[0], keep=2)
    store.load(store.folder / "step_00000020", empty)
    same(empty, state)


@pytest.mark.slow
def test_every_element_is_stored_once(two, state):
    path = two[0] / "checkpoints" / "step_00000020"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for part, named in state.items():
        for name, tensor in named.items():
            chunks = metadata.state_dict_metadata[f"{part}.{name}"].chunks
            assert sum(math.prod(chunk.sizes) for chunk in chunks) == tensor.numel()
            stored = [index for index in metadata.storage_data if index.fqn == f"{part}.{name}"]
            assert len(stored) == len(chunks)
    used = {stored.relative_path for stored in metadata.storage_data.values()}
    assert used == {"__0_0.distcp", "__1_0.distcp"}, "both ranks write"
    lengths = sum(stored.length for stored in metadata.storage_data.values())
    assert lengths == sum(file.stat().st_size for file in path.glob("*.distcp"))


@pytest.mark.slow
def test_three_ranks_load_what_two_saved_and_one_loads_theirs(tmp_path, two, state, empty, same):
    folder = tmp_path / "run"
    source = two[0] / "checkpoints" / "step_00000020"
    target = folder / "checkpoints" / source.name
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    assert [said["loaded what another world saved"] for said in run(3, folder, "three")] == [True] * 3
    store = CheckpointStore(folder, keep=2)
    assert store.load(store.latest(), empty)["step"] == 30
    same(empty, state)
    assert torch.equal(empty["optimizer"]["blocks.0.weight.step"], torch.tensor(12.0))


@pytest.mark.slow
def test_two_ranks_save_behind_the_loops_back(tmp_path):
    """The writer has a process group of its own, and what fails on one rank fails on both."""
    first, second = spoken(run_ranks(SCRIPT.with_name("checkpoint_async_ranks.py"), 2, tmp_path))
    assert first == second, "both ranks say the same of everything"
    assert first["saved"] == ["done", ["step_00000001"]]
    assert first["as it was"] is True
    assert first["a full disk on rank 1"] == (
        "rank 1: writing the checkpoint failed: [Errno 27] File too large\n"
        "  hint: check free space, quota and permissions of the run folder, on every node"
    )
    assert re.fullmatch(
        r"rank 1, step_00000002: the copy of (\S+) to be saved differs from \1 in training: nothing was"
        " saved\n"
        "  hint: the copy in host memory is wrong: set checkpoint.async=false, and report this as a bug",
        first["a stale copy on rank 1"],
    )
    assert first["not finite on rank 1"] == (
        "rank 1, step_00000003: blocks.0.weight is not finite, so nothing was saved\n"
        "  hint: resume from the last checkpoint with a lower learning rate"
    )
    assert first["chosen"] == [
        "step_00000001",
        ["this checkpoint is damaged: __1_0.distcp does not match its checksum"],
    ]
    assert first["left"] == [1]
    assert first["chosen by what one rank saw"] == [
        "step_00000001",
        ["facts.json has an invalid value, step: -5"],
    ]
    assert first["no memory on rank 1"].startswith("rank 1: not enough host memory for a copy of model.w: ")
    assert first["after it"] == "done"
    names = {path.name.partition(".damaged-")[0] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"LATEST", "step_00000001", "step_00000004", "step_00000005"}


@pytest.mark.slow
def test_a_rank_that_has_an_error_to_print_does_not_wait_for_one_that_ended_within_a_save(tmp_path):
    script = SCRIPT.with_name("checkpoint_async_ranks.py")
    answers = spoken(run_ranks(script, 2, tmp_path, "fault", timeout=60))
    assert answers[0] == {"in time": True, "saved": []}
