"""`targets: auto`: which modules of real classes get a LoRA, as lists."""

from __future__ import annotations

import re

import pytest
from classes import CASES, Task
from torch import nn

from mm_core.errors import PlanError
from mm_core.weights.adapters.inject import scales_of


@pytest.mark.parametrize("name", CASES)
def test_auto_adapts_attention_and_feed_forward_of_the_blocks_and_nothing_else(name):
    build, wanted = CASES[name]
    found = scales_of(Task(build).predictor)["default"]
    assert all(path.startswith("transformer.") for path in found)
    bare = {re.sub(r"\.\d+\.", ".N.", path.removeprefix("transformer."), count=1) for path in found}
    assert sorted(bare) == sorted(wanted)


def test_auto_needs_repeated_blocks():
    with pytest.raises(PlanError, match="'auto' finds no attention or feed-forward in repeated blocks of pr"):
        Task(lambda: nn.Sequential(nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))))
