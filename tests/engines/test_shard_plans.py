"""A model with a sharding plan of its own trains as one without, and torch gathers ahead as planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.tensors import same

SCRIPT = Path(__file__).with_name("shard_plan_ranks.py")
pytestmark = pytest.mark.slow


def outcome(folder: Path, world: int, **fields: object) -> dict:
    run_ranks(SCRIPT, world, folder / "out.pt", json.dumps(fields))
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("world", [1, 2])
def test_a_plan_changes_no_weight_and_is_what_torch_does(tmp_path, world):
    found = outcome(tmp_path, world)
    for name in ("plan", "order"):
        same(found["plain"]["weights"], found[name]["weights"])
        assert found[name]["norms"] == pytest.approx(found["plain"]["norms"], rel=1e-6)
    assert not any(ahead for way in found["plain"]["prefetch"].values() for ahead in way.values())
    assert found["plan"]["prefetch"] == {
        "forward": {
            "": [],
            "blocks.0": ["blocks.1", "blocks.2"],
            "blocks.1": ["blocks.2", "last"],
            "blocks.2": ["last"],
            "last": [],
        },
        "backward": {
            "": [],
            "blocks.0": [],
            "blocks.1": ["blocks.0"],
            "blocks.2": ["blocks.1", "blocks.0"],
            "last": ["blocks.2", "blocks.1"],
        },
    }
    assert found["plan"]["recomputed"] == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert found["order"]["recomputed"] == []
    assert found["order"]["prefetch"] == {
        "forward": {"": [], "blocks.0": ["blocks.1"], "blocks.1": [], "blocks.2": ["blocks.0", "blocks.1"]},
        "backward": {"": [], "blocks.0": ["blocks.2"], "blocks.1": ["blocks.0", "blocks.2"], "blocks.2": []},
    }


def test_the_config_sets_torch_before_the_plan(tmp_path):
    found = outcome(tmp_path, 1, num_to_forward_prefetch=1, num_to_backward_prefetch=0, recompute_modules=[])
    assert found["plan"]["prefetch"]["forward"]["blocks.0"] == ["blocks.1"]
    assert not any(found["plan"]["prefetch"]["backward"].values())
    assert found["plan"]["recomputed"] == []
