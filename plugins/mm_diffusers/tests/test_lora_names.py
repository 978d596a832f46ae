"""Names in LoRA files of other programs: those that they know, and joined modules are read."""

from __future__ import annotations

import pytest
import torch
from classes import CASES, Task
from mm_diffusers.lora_names import with_names
from safetensors.torch import save_file
from tuned import KNOWN, changes, without_numbers

from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.weights import Diffusers
from mm_core.weights.adapters.inject import scales_of
from mm_core.weights.adapters.layouts import LoraFormat
from mm_core.weights.adapters.stored_names import module_key, path_key, shares_in

DOUBLE, SINGLE = "transformer.transformer_blocks.0.attn", "transformer.single_transformer_blocks.0"


class Named(Diffusers):
    """A weight format with the names of a class."""

    def adapter(self, name, component):
        return with_names(super().adapter(name, component), type(component["transformer"]).__name__)


@pytest.mark.parametrize(
    "case,program",
    [
        *((case, "comfyui") for case in CASES if case not in ("Wan", "Cosmos")),
        *((case, "kohya") for case in CASES if case not in ("Wan", "Cosmos", "LTXVideo")),
    ],
)
def test_every_module_is_one_that_the_program_knows(case, program):
    model = Task(CASES[case][0]).predictor
    (layout,) = LoraFormat(f"lora/{program}", {"": Named()}, "a.safetensors", {}).adapter("predictor", model)
    own = {base_name(n): p.shape for n, p in model.named_parameters() if adapter_of(n) is None}
    shares = shares_in(layout, own)
    paths = list(scales_of(model)["default"])
    keys = [path_key(layout, shares[p].stored) if p in shares else module_key(layout, p) for p in paths]
    assert without_numbers(keys) <= set(KNOWN[type(model["transformer"]).__name__][program])


@pytest.mark.parametrize("start", ["lora_unet_{}", "diffusion_model.{}"])
def test_a_lora_of_a_joined_module_is_one_of_each_of_its_parts(pipeline_of, tmp_path, start):
    rows = {"img_attn.qkv": [32] * 3, "txt_attn.proj": [32], "linear1": [32, 32, 32, 128]}
    paths = {name: f"double_blocks.0.{name}" for name in rows} | {"linear1": "single_blocks.0.linear1"}
    drawn = torch.Generator().manual_seed(0)
    stored, wanted = {}, {}
    for name, sizes in rows.items():
        down, up = (
            torch.randn(4, 32, generator=drawn),
            torch.randn(sum(sizes), 4, generator=drawn),
        )
        flat = start.startswith("lora")
        key = start.format(paths[name].replace(".", "_") if flat else paths[name])
        stored |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        stored[f"{key}.alpha"] = torch.tensor(2.0)
        wanted[name] = (0.5 * up @ down).split(sizes)
    save_file(stored, tmp_path / "other.safetensors")
    found = changes(pipeline_of("FluxPipeline"), tmp_path / "other.safetensors")
    q, k, v = (f"{DOUBLE}.to_{name}" for name in "qkv")
    single = [*(f"{SINGLE}.attn.to_{name}" for name in "qkv"), f"{SINGLE}.proj_mlp"]
    named = dict(zip((q, k, v), wanted["img_attn.qkv"], strict=True))
    named |= dict(zip(single, wanted["linear1"], strict=True))
    named[f"{DOUBLE}.to_add_out"] = wanted["txt_attn.proj"][0]
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], named[name]) for name in named)
