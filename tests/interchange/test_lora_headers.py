"""What the header and the note of a LoRA file say is true for who reads them."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from torch import nn

from mm_core.interchange.lora import export_lora, network_texts, outside_blocks
from mm_core.weights.adapters.files import AdapterScale
from support import runs

LYCORIS = "lycoris.kohya"


def texts(*scales: AdapterScale) -> dict[str, str]:
    return network_texts(scales)


@pytest.mark.parametrize("scale", [
    AdapterScale(16, 8.0), AdapterScale(8, 4.0, rslora=True), AdapterScale(7, 3.0, rslora=True),
    AdapterScale(2, 1.0, kind="lokr"), AdapterScale(3, 6.0, kind="loha"), AdapterScale(4, 2.0, dora=True),
], ids=str)  # fmt: skip
def test_alpha_over_dim_is_the_factor(scale):
    found = texts(scale, scale)
    assert float(found["ss_network_alpha"]) / int(found["ss_network_dim"]) == pytest.approx(scale.factor)


def test_the_alpha_of_rslora_is_that_of_a_reader_without_it():
    assert texts(AdapterScale(16, 8.0, rslora=True))["ss_network_alpha"] == "32"
    assert float(texts(AdapterScale(8, 4.0, rslora=True))["ss_network_alpha"]) == pytest.approx(4 * sqrt(8))


def test_what_differs_between_modules_is_dynamic_as_in_kohya_s_scripts():
    """sd-scripts' networks/resize_lora.py and merge_lora.py."""
    ranks = texts(AdapterScale(16, 8.0), AdapterScale(4, 8.0))
    assert (ranks["ss_network_dim"], ranks["ss_network_alpha"]) == ("Dynamic", "8")
    alphas = texts(AdapterScale(16, 8.0), AdapterScale(16, 4.0))
    assert (alphas["ss_network_dim"], alphas["ss_network_alpha"]) == ("16", "Dynamic")


@pytest.mark.parametrize(
    ("scales", "module", "args"),
    [
        ([AdapterScale(4, 4.0)], "networks.lora", None),
        ([AdapterScale(4, 4.0, dora=True)], LYCORIS, {"algo": "lora", "dora_wd": "True"}),
        ([AdapterScale(4, 4.0, kind="loha")], LYCORIS, {"algo": "loha"}),
        ([AdapterScale(4, 4.0, kind="lokr")], LYCORIS, {"algo": "lokr"}),
        ([AdapterScale(1, 1.0, kind="lokr", blocks=(4, 4, 16, 6))], LYCORIS, {"algo": "lokr", "factor": "4"}),
        ([AdapterScale(1, 1.0, kind="lokr", blocks=(16, 4, 4, 6))], LYCORIS, {"algo": "lokr"}),
    ],
)
def test_the_module_is_the_one_that_writes_such_tensors(scales, module, args):
    found = texts(*scales)
    assert found["ss_network_module"] == module
    assert (json.loads(found["ss_network_args"]) if args else found.get("ss_network_args")) == args


def test_modules_outside_the_lists_of_a_model_are_found():
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Sequential(nn.Linear(2, 2))}
    )
    assert outside_blocks(model, ["blocks.0", "head.0"]) == ["head.0"]


# -- of runs -------------------------------------------------------------------------------------

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "out_channels": 12}
WAN |= {key: runs.DIT[key] for key in ("num_layers", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two adapters of other ranks, one of them also outside the blocks."""
    folder = tmp_path_factory.mktemp("headers")
    torch.manual_seed(4)
    origin = folder / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    adapters = [
        {"name": "style", "targets": ["to_q", "proj_out"], "rank": 2, "alpha": 2.0, "rslora": True},
        {"name": "motion", "targets": ["to_k"], "rank": 4, "ranks": {"predictor.blocks.{0}": 3}},
    ]
    runs.trained(runs.config_of(folder, runs.VIDEO, train={"epochs": 1, "adapters": adapters}), origin)
    return folder / "runs/tuned"


@pytest.mark.slow
@pytest.mark.parametrize("label", ["lora/comfyui", "lora/kohya", "lora/diffusers"])
def test_each_file_has_the_texts_of_its_own_adapter_and_notes_what_is_skipped(run, label, tmp_path):
    notes: list[str] = []
    files = export_lora(run, tmp_path / "a.safetensors", label, note=notes.append)
    found = {}
    for path in files:
        with safe_open(path, "pt") as held:
            found[path.name.split("_")[0]] = held.metadata()
    assert {name: texts["ss_network_dim"] for name, texts in found.items()} == {
        "style": "2",
        "motion": "Dynamic",
    }
    assert float(found["style"]["ss_network_alpha"]) == pytest.approx(2 * sqrt(2))
    skipped = [note for note in notes if "outside the model's blocks" in note]
    if label == "lora/diffusers":
        assert not skipped
    else:
        assert skipped == [
            "1 module of 'style' outside the model's blocks (proj_out): musubi-tuner's training skips these"
            " (--network_weights, --base_weights); its generation and ComfyUI apply them"
        ]
