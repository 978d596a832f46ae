"""`mm weights show` and `mm weights diff` on real files."""

from __future__ import annotations

import json
import os

import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.store import CheckpointStore
from mm_core.cli.main import main
from mm_core.errors import CheckpointError
from mm_core.weights import open_stored

WAN = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 12,
    "out_channels": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 48,
    "patch_size": (2, 2, 2),
    "rope_max_seq_len": 64,
}


@pytest.fixture
def wan(tmp_path):
    torch.manual_seed(0)
    WanTransformer3DModel(**WAN).save_pretrained(tmp_path / "wan")
    return tmp_path / "wan"


def test_show_folds_blocks_and_names_format_and_component(wan, tiny, mm):
    shown = mm("weights", "show", wan, "--config", tiny)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert any(
        line.split() == ["blocks.{*}.attn1.to_q.weight", "24x24", "fp32", "2.3", "kB", "x", "2"]
        for line in lines
    )
    known = lines[-2].removeprefix("format: ").split(", ")
    assert {"custom_dit/wan_transformer", "core/diffusers", "core/safetensors"} <= set(known)
    assert lines[-1] == "fits predictor (CustomDiT) by custom_dit/wan_transformer: yes, completely"
    whole = mm("weights", "show", wan, "--all", "--json")
    document, tensors = json.loads(whole.out), load_file(wan / "diffusion_pytorch_model.safetensors")
    assert set(document["tensors"]) == set(tensors) and document["metadata"] == {"format": "pt"}
    assert document["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


def test_show_lists_what_does_not_fit(wan, tiny, tmp_path, mm):
    config = yaml.safe_load(tiny.read_text())
    config["task"]["predictor"]["num_layers"] = 3
    (tmp_path / "deep.yaml").write_text(yaml.safe_dump(config))
    shown = mm("weights", "show", wan, "--config", tmp_path / "deep.yaml")
    assert "fits predictor (CustomDiT) by custom_dit/wan_transformer: 69 tensors; 27 missing" in shown.out


def test_diff_finds_the_first_number_that_differs(wan, tmp_path, mm):
    same = mm("weights", "diff", wan, wan / "diffusion_pytorch_model.safetensors")
    assert same.code == 0 and same.out == "69 tensors equal, 0 different\n"
    tensors = load_file(wan / "diffusion_pytorch_model.safetensors")
    tensors["proj_out.bias"] = torch.zeros(96)
    tensors["proj_out.bias"][7] = 0.5
    tensors["extra"] = tensors.pop("scale_shift_table")
    tensors["proj_out.weight"] = tensors["proj_out.weight"].bfloat16().float()
    tensors["patch_embedding.bias"] = tensors["patch_embedding.bias"][:20].clone()
    other = dict(tensors)
    before = load_file(wan / "diffusion_pytorch_model.safetensors")
    before["proj_out.bias"] = torch.zeros(96)
    save_file(before, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    found = mm("weights", "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    lines = found.out.splitlines()
    assert found.code == 1
    assert lines[:3] == [
        "only in A: scale_shift_table",
        "only in B: extra",
        "patch_embedding.bias: shapes differ, [24] and [20]",
    ]
    assert "proj_out.bias: norms 0 and 0.5, differs by up to 0.5; first at [7]: 0 and 0.5" in lines
    place = int((before["proj_out.weight"] != other["proj_out.weight"]).nonzero()[0][1])
    assert any(
        line.startswith("proj_out.weight: norms ") and f"first at [0, {place}]" in line for line in lines
    )
    assert lines[-1] == "65 tensors equal, 5 different"


def test_diff_sees_through_dtypes_and_a_checkpoints_names(tmp_path, mm):
    model = {f"predictor.{name}": torch.arange(6.0).view(2, 3) for name in ("a.base_layer.weight", "b")}
    CheckpointStore(tmp_path / "run", keep=1).save(1, {"model": model, "optimizer": {}}, {}, "x: 1\n")
    save_file(
        {"a.weight": model["predictor.b"].bfloat16(), "b": model["predictor.b"]}, tmp_path / "w.safetensors"
    )
    found = mm("weights", "diff", tmp_path / "run", tmp_path / "w.safetensors")
    assert found.out.splitlines() == [
        "1 tensor with different dtypes: a.weight is fp32 in A and bf16 in B",
        "2 tensors equal, 0 different",
    ]
    assert found.code == 0


def test_a_step_of_a_run_is_named_as_for_an_export(tmp_path, capsys):
    store = CheckpointStore(tmp_path / "run", keep=2)
    for step in (1, 2):
        model = {"predictor.a": torch.full((2,), float(step)), "predictor.b": torch.zeros(2)}
        store.save(step, {"model": model, "optimizer": {}}, {}, "x: 1\n")
    assert main(["weights", "diff", f"{tmp_path}/run@1", f"{tmp_path}/run@latest"]) == 1
    found = capsys.readouterr().out
    assert found.splitlines()[-1] == "1 tensor equal, 1 different"
    assert found.startswith("predictor.a: norms 1.41421 and 2.82843")
    assert main(["weights", "show", f"{tmp_path}/run@2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "format: checkpoint"
    assert main(["weights", "show", f"{tmp_path}/run@3"]) == 1
    error = capsys.readouterr().err
    assert "this run has no complete checkpoint '3'" in error
    assert "accepted: 1, 2, best, latest" in error


def test_show_and_diff_of_nothing_are_readable_errors(tmp_path, mm):
    for command in (("show", tmp_path), ("diff", tmp_path, tmp_path)):
        done = mm("weights", *command)
        assert done.code == 1 and "this folder is neither a checkpoint nor a run" in done.err
    done = mm("weights", "show", tmp_path / "x.safetensors")
    assert done.code == 1 and "there is no such file or folder" in done.err and "Traceback" not in done.err


def test_a_pipe_under_the_name_of_weights_is_not_waited_for(tmp_path, mm):
    os.mkfifo(tmp_path / "model.safetensors")
    done = mm("weights", "show", tmp_path / "model.safetensors")
    assert done.code == 1
    with pytest.raises(CheckpointError, match="this is not a file"):
        open_stored(tmp_path)
