"""MindSpeed-MM's saves of Wan, in and out: every bit the same, and nothing in a save runs."""

from __future__ import annotations

import argparse
import os
from enum import Enum
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import wan_runs as runs
import wan_variants as variants
from mm_mindspeed.weights import KEYS, MindSpeedWan

from mm_core.errors import CheckpointError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from support.tensors import same, stored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = {**runs.CHANNELS, "ffn_dim": 48}
SAVE = "release/mp_rank_00/model_optim_rng.pt"
GOLDEN = {
    "condition_embedder.text_embedder.linear_2.bias": "text_embedding.linear_2.bias",
    "condition_embedder.time_embedder.linear_1.weight": "time_embedding.0.weight",
    "condition_embedder.time_proj.weight": "time_projection.1.weight",
    "condition_embedder.image_embedder.norm2.bias": "img_emb.proj.4.bias",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "scale_shift_table": "head.modulation",
    "proj_out.weight": "head.head.weight",
    "patch_embedding.weight": "patch_embedding.weight",
    "blocks.7.attn1.norm_q.weight": "blocks.7.self_attn.q_norm.weight",
    "blocks.7.attn1.to_out.0.bias": "blocks.7.self_attn.proj_out.bias",
    "blocks.7.attn2.to_v.weight": "blocks.7.cross_attn.proj_v.weight",
    "blocks.7.attn2.add_k_proj.weight": "blocks.7.cross_attn.k_img.weight",
    "blocks.7.attn2.norm_added_k.weight": "blocks.7.cross_attn.k_norm_img.weight",
    "blocks.7.ffn.net.0.proj.weight": "blocks.7.ffn.0.weight",
    "blocks.7.ffn.net.2.bias": "blocks.7.ffn.2.bias",
    "blocks.7.norm2.weight": "blocks.7.norm3.weight",
    "blocks.7.scale_shift_table": "blocks.7.modulation",
}
"""Pairs of its converter's tables (checkpoint/sora_model/wan_converter.py)."""


def test_names_are_those_of_its_converter():
    assert {name: KEYS.renamed(name) for name in GOLDEN} == GOLDEN


def named(variant: str = "wan2.1-t2v-1.3b") -> dict[str, torch.Tensor]:
    """A tiny Wan's weights by MindSpeed-MM's names."""
    model = variants.published(variant, **SIZES)
    return {str(KEYS.renamed(name)): t.detach().clone() for name, t in model.state_dict().items()}


def run_of(folder: Path, variant: str = "wan2.1-t2v-1.3b", name: str = "tuned"):
    return runs.config_of(folder, {"type": "wan/transformer", **variants.tiny(variant, **SIZES)}, name)


def released(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / SAVE).parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    torch.save({"model": tensors}, folder / SAVE)
    return folder


class Backend(Enum):
    FUSED = 1


def trained(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As `--save` of its training by Megatron: settings, random states and the other modules beside."""
    place = folder / "iter_0000020/mp_rank_00"
    place.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20\n")
    settings = argparse.Namespace(
        lr=1e-5, params_dtype=torch.bfloat16, load=PosixPath("/x"), of=Backend.FUSED
    )
    held = {f"predictor.{name}": tensor for name, tensor in tensors.items()}
    state = {"args": settings, "iteration": 20, "checkpoint_version": 3.0}
    state |= {"model": {**held, "ae.conv1.weight": torch.ones(2)}}
    state |= {"rng_state": [{"np_rng_state": np.random.get_state(), "random_rng_state": (3, (1, 2), None)}]}
    torch.save(state, place / "model_optim_rng.pt")
    return folder


def sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As its FSDP2 training saves (torch_dcp), with an optimizer."""
    place = folder / "iter_0000300"
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    model = {f"predictor.{name}": tensor for name, tensor in tensors.items()}
    moments = {f"{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in model.items()}
    state = {"model": model, "optimizer": {"state": moments}, "args": {"lr": 1e-5}}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("save", [released, trained, sharded])
def test_in_and_out_is_bit_equal(save, tmp_path):
    tensors = named()
    checkpoint, _ = import_weights(run_of(tmp_path), save(tmp_path / "theirs", tensors))
    out = export(checkpoint, tmp_path / "out", "mindspeed/wan")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    written = torch.load(out / SAVE, weights_only=True)
    assert written.keys() == {"model"}
    same(written["model"], tensors)
    again, _ = import_weights(run_of(tmp_path, name="again"), out)
    export(again, tmp_path / "diffusers", "wan/diffusers")
    same(stored(tmp_path / "diffusers"), dict(variants.published("wan2.1-t2v-1.3b", **SIZES).state_dict()))


@pytest.mark.slow
def test_a_run_of_an_image_model_begins_with_them(tmp_path):
    fields = {**variants.tiny("wan2.1-flf2v-14b-720p", **SIZES), "in_channels": 12 + 16}
    model = variants.published("wan2.1-flf2v-14b-720p", **{**SIZES, "in_channels": 28})
    tensors = {str(KEYS.renamed(name)): t for name, t in model.state_dict().items()}
    from transformers import CLIPVisionConfig

    CLIPVisionConfig(hidden_size=10, num_attention_heads=2).save_pretrained(tmp_path / "clip")
    clip = {"type": "wan/clip_vision", "from_pretrained": str(tmp_path / "clip")}
    config = runs.config_of(tmp_path, {"type": "wan/transformer", **fields}, image_encoder=clip)
    checkpoint, _ = import_weights(config, sharded(tmp_path / "theirs", tensors))
    written = torch.load(export(checkpoint, tmp_path / "out", "mindspeed/wan") / SAVE, weights_only=True)
    same(written["model"], tensors)


class Bomb:
    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


def test_nothing_in_a_save_runs(tmp_path):
    folder = released(tmp_path / "theirs", named())
    torch.save({"model": named(), "args": Bomb(tmp_path / "code-has-run")}, folder / SAVE)
    with pytest.raises(CheckpointError, match=r"it would import .*mkdir"):
        MindSpeedWan().open(folder)
    assert not (tmp_path / "code-has-run").exists()


def test_saves_that_cannot_be_read_are_a_sentence_each(tmp_path):
    folder = released(tmp_path / "theirs", {"other.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match="this save holds no Wan"):
        MindSpeedWan().open(folder)
    (folder / "release/mp_rank_01").mkdir()
    with pytest.raises(CheckpointError, match="divided among 2 ranks of tensor or pipeline") as caught:
        MindSpeedWan().open(folder)
    assert "resplit" in caught.value.render()
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    with pytest.raises(CheckpointError, match="No such file"):
        MindSpeedWan().open(folder)
