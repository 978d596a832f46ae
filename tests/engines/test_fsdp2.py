"""The engine: any split of a global batch over ranks and micro-batches trains the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("engine_ranks.py")


def outcome(tmp_path: Path, world: int, case: str):
    out = tmp_path / f"{world}-{case}.pt"
    run_ranks(SCRIPT, world, out, case, timeout=600)
    return torch.load(out, weights_only=False)


def distance(a: dict, b: dict) -> float:
    """Global relative L2."""
    gap = sum(float((a[k] - b[k]).square().sum()) for k in a)
    return (gap / sum(float(b[k].square().sum()) for k in b)) ** 0.5


def worst_tensor(a: dict, b: dict) -> float:
    """Largest relative max-norm difference of a tensor."""
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp_min(1e-8)) for k in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One rank, one batch of all 8 rows: what every other split must equal."""
    return outcome(tmp_path_factory.mktemp("whole"), 1, "8,auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "micro", "shard"), [(1, 4, "auto"), (2, 4, "auto"), (2, 4, 1), (2, 2, "auto"), (4, 2, 2)]
)
def test_every_split_equals_one_whole_batch(tmp_path, whole, world, micro, shard):
    if (
        shard != "auto"
        and world // shard > 1
        and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    ):
        with pytest.raises(AssertionError, match="cannot keep replicas on CPU"):
            outcome(tmp_path, world, f"{micro},{shard}")
        return
    split = outcome(tmp_path, world, f"{micro},{shard}")
    assert worst_tensor(split["gradients"], whole["gradients"]) < 1e-5
    assert distance(split["weights"], whole["weights"]) < 1e-5


def test_two_ranks_equal_accumulation_on_one(tmp_path):
    one, two = outcome(tmp_path, 1, "4,auto"), outcome(tmp_path, 2, "4,auto")
    assert worst_tensor(two["gradients"], one["gradients"]) < 1e-6
    assert distance(two["weights"], one["weights"]) < 1e-6


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_world(tmp_path):
    assert len({outcome(tmp_path, world, "init") for world in (1, 2, 3)}) == 1


@pytest.mark.slow
def test_a_timestep_is_never_cast(tmp_path):
    seen = outcome(tmp_path, 1, "bf16")
    assert seen["dtype"] == torch.bfloat16, "inputs are cast to param_dtype"
    assert seen["timestep"].dtype == torch.float32
    expected = torch.linspace(1, 998.7, 8)[4:]
    assert expected[-1].item() == pytest.approx(998.7, abs=1e-4)
    assert torch.equal(seen["timestep"], expected)


@pytest.mark.slow
def test_recomputation_changes_nothing(tmp_path):
    plain, recomputed, reentrant = outcome(tmp_path, 1, "recompute")
    assert plain["losses"] == recomputed["losses"] == reentrant["losses"]
    assert all(torch.equal(plain["weights"][k], recomputed["weights"][k]) for k in plain["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["offload", "prefetch"])
def test_where_and_when_parameters_are_gathered_changes_nothing(tmp_path, case):
    plain, other = outcome(tmp_path, 2, case)
    assert plain["losses"] == other["losses"]
    assert all(torch.equal(plain["weights"][k], other["weights"][k]) for k in plain["weights"])


@pytest.mark.slow
def test_an_ignored_part_is_neither_sharded_nor_trained(tmp_path):
    seen = outcome(tmp_path, 2, "ignored")
    assert seen == {
        "plain": True,
        "kept": True,
        "ignored": ("predictor.condition_embedder.text_embedder",),
    }
