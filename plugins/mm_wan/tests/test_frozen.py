"""`wan/umt5` and `wan/vae` compute the same bits wherever their weights lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mm_wan.testing import make_tiny_checkpoint

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("frozen_ranks.py")


@pytest.mark.slow
def test_two_ranks_encode_and_decode_the_same_bits_wherever_the_weights_lie(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "wan")
    found = {}
    for placement in ("replicated", "sharded", "offloaded"):
        run_ranks(SCRIPT, 2, tmp_path / placement, folder, placement)
        # It holds a plan, which is no tensor; this test wrote it.
        found[placement] = [torch.load(f"{tmp_path}/{placement}.{r}", weights_only=False) for r in (0, 1)]
    whole = found["replicated"]
    assert whole[0]["made"]["latents"].shape[2] == 2 and whole[1]["made"]["latents"].shape[2] == 3
    for placement in ("sharded", "offloaded"):
        for rank, seen in enumerate(found[placement]):
            for name, tensor in whole[rank]["made"].items():
                assert torch.equal(seen["made"][name], tensor), (placement, rank, name)
        for seen in found[placement]:
            share = {"sharded": 0.6, "offloaded": 0.01}[placement]
            for name, size in seen["held"].items():
                assert size <= share * whole[0]["held"][name] + 4 * 200, (placement, name)
    blocks = {plan.name: plan.blocks for plan in found["sharded"][0]["plan"]}
    assert blocks["text_encoder"] == tuple(f"text_encoder.encoder.model.encoder.block.{i}" for i in (0, 1))
    assert blocks["autoencoder"] == ()  # its layers run once for each piece of a clip
