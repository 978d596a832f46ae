"""Steps whose norm the host reads late: the same run, and no update with a step that is not finite."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.scripts import script

pytestmark = pytest.mark.slow
CLOCKED = re.compile("time|second|wait|memory")
SCRIPT = Path(__file__).with_name("late_ranks.py")


@pytest.fixture(scope="module")
def found(tiny, tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("late")
    run_ranks(SCRIPT, 2, tiny, folder)
    return folder, [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


def test_fifty_planted_faults_update_nothing_and_their_steps_are_named(found):
    parts = script(SCRIPT)
    plants = parts.plants_of(2)
    assert len(plants) == 50 and {rank for rank, _ in plants.values()} == {0, 1}
    for rank in found[1]:
        late = rank["late"]
        assert late["updates"] == parts.STEPS
        assert not plants.keys() & set(late["moved"]), "an update with a step that is not finite"
        assert sorted({*late["moved"], *plants}) == list(range(parts.STEPS)), "all others update"
    assert found[1][0]["late"]["skipped"] == sorted(step + 1 for step in plants)


def reasons(notes: list[str]) -> list[str]:
    return [text for text in notes if "was skipped" in text]


def test_the_run_is_the_one_whose_norms_are_read_at_once(found):
    folder, ranks = found
    for rank in ranks:
        assert reasons(rank["late"]["notes"]) == reasons(rank["now"]["notes"])
        assert rank["late"]["state"].keys() == rank["now"]["state"].keys()
        for name, tensor in rank["now"]["state"].items():
            assert torch.equal(rank["late"]["state"][name], tensor), name
    rows = [
        [json.loads(line) for line in (folder / kind / "tiny/metrics.jsonl").read_text().splitlines()]
        for kind in ("now", "late")
    ]
    for now, late in zip(*rows, strict=True):
        same = {name for name in now if not CLOCKED.search(name)}
        assert {"loss", "grad_norm", "lr", "samples"} <= same
        assert same == {name for name in late if not CLOCKED.search(name)}
        assert str([now[name] for name in same]) == str([late[name] for name in same])


def test_a_run_that_ends_at_a_fault_ends_at_the_right_step_with_the_weights_before_it(found):
    for rank in found[1]:
        now, late = rank["stopped now"], rank["stopped late"]
        assert late["fault"] == now["fault"] != ""
        assert late["updates"] == rank["first"] + 1, "the next step is computed, not used"
        for ours, theirs in zip(late["weights"], now["weights"], strict=True):
            assert torch.equal(ours, theirs)
    assert f"step {found[1][0]['first'] + 1}, samples" in found[1][1]["stopped late"]["fault"]
