"""A frozen base streamed from host memory trains the same adapters, bit by bit, in a few blocks' memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.modules.adapter_layers import adapter_of
from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("base_ranks.py")


CASES = [(1, "bf16", 0), (1, "fp32", 1), (2, "fp32", 2), (2, "bf16", 2), (1, "fp32", 4), (2, "bf16", 9)]
CASES = [*((*case, "other") for case in CASES), (2, "bf16", 1, "reentrant")]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "dtype", "keep", "form"), CASES)
def test_streamed_training_is_bit_equal(world, dtype, keep, form, tmp_path):
    out = tmp_path / "out.pt"
    run_ranks(SCRIPT, world, out, f"{dtype},{keep},{form}")
    resident, streamed, most = torch.load(out, weights_only=False)
    assert streamed["losses"] == resident["losses"]
    for name, tensor in resident["state"].items():
        assert torch.equal(streamed["state"][name], tensor), name
        assert torch.isfinite(tensor).all()
    trained = [t for n, t in resident["state"].items() if (adapter_of(n) or "")[1:2] == ("lora_B",)]
    assert trained and all(tensor.any() for tensor in trained)
    assert most == min(keep + 1, 6)
