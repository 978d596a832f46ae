"""Weights in shards: each rank reads its own, shared parameters stay one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("weights_ranks.py")
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.slow
def test_a_component_with_tied_weights_begins_from_its_folder_and_trains_alike_on_two_ranks(tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path / "qwen")
    found = {}
    for world in (1, 2):
        run_ranks(SCRIPT, world, tmp_path / f"{world}.pt", tmp_path / "qwen")
        found[world] = torch.load(tmp_path / f"{world}.pt")
        assert found[world]["notes"] == [f"{tmp_path}/qwen: 24 tensors loaded (core/transformers)"]
        assert "text.model.model.embed_tokens.weight" in found[world]["names"]
        assert not any("lm_head" in name for name in (*found[world]["names"], *found[world]["loaded"]))
        for name, tensor in theirs.named_parameters():
            assert torch.equal(found[world]["loaded"][f"text.model.{name}"], tensor), name
    moved = 0
    for name, tensor in found[1]["trained"].items():
        torch.testing.assert_close(found[2]["trained"][name], tensor, rtol=1e-5, atol=1e-6)
        moved += not torch.equal(tensor, found[1]["loaded"][name])
    assert moved == len(found[1]["trained"]) == 24
