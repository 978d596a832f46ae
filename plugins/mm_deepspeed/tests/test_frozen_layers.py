"""Frozen layers inside a trained component: stored as they were given, and loaded into what computes."""

from __future__ import annotations

import pytest
import torch
from mm_deepspeed.engine import DeepSpeedEngine

from mm_core.modules import gathered
from mm_core.runtime.process_group import process_group
from mm_core.testing.training.engines.task import Trial, network_values

NAME = "net.fixed.weight"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_a_frozen_layer_is_stored_in_float32_and_a_loaded_one_computes(stage: int) -> None:
    settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    given = network_values()
    with process_group():
        one = Trial(DeepSpeedEngine(settings=settings), values=given)
        one.step(0)
        state = one.engine.state_dict()
        assert torch.equal(gathered(state["model"][NAME]), given[NAME])
        other = {**given, NAME: given[NAME] + 1}
        two = Trial(DeepSpeedEngine(settings=settings), values=other)
        two.step(0)
        assert two.loss(5) != one.loss(5)
        two.engine.load_state_dict(state)
        assert two.loss(5) == one.loss(5)
