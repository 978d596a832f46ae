"""A step over local shards: the bits of torch's functions over DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.builtin.configs.training import AdamWConfig
from mm_core.config.sections import TrainSection
from mm_core.optim.adamw import adamw
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.process_group import process_group
from support.ranks import run_ranks
from support.scripts import script

SCRIPT = Path(__file__).with_name("local_ranks.py")
RANKS = script(SCRIPT)


@pytest.mark.parametrize("optimizer", RANKS.OPTIMIZERS)
def test_norms_weights_states_and_averages_are_those_of_dtensors(optimizer):
    with process_group():
        RANKS.compare(RANKS.OPTIMIZERS[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("world, sharding_size", [(3, 3), (2, 1), (4, 2)])
def test_on_several_ranks_too_sharded_replicated_and_hybrid(world, sharding_size):
    run_ranks(SCRIPT, world, sharding_size)


def test_the_optimizer_of_a_run_has_plain_views_of_the_shards():
    def make(named):
        return adamw(groups_of(named, TrainSection(steps=1)), **vars(AdamWConfig(lr=1e-3)))

    with torch.device("meta"):
        task = RANKS.Task(predictor=RANKS.Uneven())
    engine = RANKS.FSDP2Engine()
    with process_group():
        engine.prepare(task, engine.plan(task, 1, 2), make, RANKS.Randomness(0))
        held = [p for group in engine._optimizer.param_groups for p in group["params"]]
        assert {type(p.data) for p in held} == {torch.Tensor}
        addresses = {shard.master.data_ptr() for shard in engine.shards()}
        assert {p.data_ptr() for p in held} == addresses


def test_shards_are_made_again_only_where_their_memory_has_moved():
    with process_group():
        _, engine = RANKS.engine_of(RANKS.OPTIMIZERS["SGD"])
        first, second = [*engine.shards()], [*engine.shards()]
        assert all(a is b for a, b in zip(first, second, strict=True))
        parameter = engine._parameters[first[0].name]
        parameter._local_tensor = parameter._local_tensor.detach().clone()
        moved = [*engine.shards()]
        assert moved[0].master.data_ptr() == parameter._local_tensor.data_ptr() != first[0].master.data_ptr()
