"""Quantised layers that are sharded with a block, or in a group of their own, as torch before 2.13 needs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mm_core.device.torch_private import shards_mixed
from mm_core.modules import quantised
from mm_core.modules.quantised import QuantisedLinear, shard_codes
from mm_core.runtime.groups import device_mesh
from mm_core.runtime.process_group import process_group


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 64).view(8, 8)
        with torch.device("meta"):
            self.inner = QuantisedLinear(nn.Linear(8, 8, bias=False), "nf4")
        self.inner.to_empty(device="cpu").take(weight)
        self.outer = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.outer.weight)

    def forward(self, x):
        return self.outer(self.inner(x))


@pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_a_group_of_their_own_computes_the_same_and_leaves_the_codes_as_they_are(monkeypatch):
    found = {}
    with process_group():
        for own in (True, *([False] if not quantised._CASTS_CODES else [])):
            monkeypatch.setattr(quantised, "_CASTS_CODES", own)
            block, shard = Block(), partial(fully_shard, mesh=device_mesh((1,), ("shard",)))
            for _ in range(2):  # of a block within another one, they are sharded already
                shard_codes(block, partial(shard, mp_policy=MixedPrecisionPolicy()))
            shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            assert isinstance(block.inner, torch.distributed.fsdp.FSDPModule) == own
            block(torch.ones(2, 8)).float().sum().backward()
            assert block.inner.weight.dtype == torch.uint8 and block.inner.weight.grad is None
            found[own] = block.outer.weight.grad.full_tensor()
    assert found[True].any() and all(torch.equal(found[True], other) for other in found.values())
