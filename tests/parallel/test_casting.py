"""Inputs are lowered, timesteps are not, recomputed or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.parallel.casting import cast_inputs
from mm_core.parallel.recompute import recompute


class Block(nn.Module):
    def forward(self, x, timestep, rotary=None):
        self.seen = (x, timestep, rotary)
        return x * 1.0


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_timestep_keeps_its_precision_in_a_block(recomputed, by_name):
    block = Block()
    if recomputed:
        recompute(block, use_reentrant=False)
    cast_inputs(block, torch.bfloat16)
    x, timestep, rotary = torch.ones(2, 3), torch.tensor([998.7]), (torch.ones(3),)
    block(x, timestep=timestep, rotary=rotary) if by_name else block(x, timestep, rotary)
    seen = block.seen
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[1], timestep) and seen[1].dtype == torch.float32
    assert seen[2][0].dtype == torch.float32
