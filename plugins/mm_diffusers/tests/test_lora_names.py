"""Names in LoRA files of other programs: those that they know, and joined modules are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from classes import CASES, Task
from mm_diffusers.formats import with_names
from PIL import Image
from safetensors.torch import save_file
from tuned import KNOWN, changes, without_numbers

import mm_core
from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.interchange.export_computed import joined_loras
from mm_core.interchange.lora import export_lora
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.weights import Diffusers
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.inject import scales_of
from mm_core.weights.adapters.layouts import LAYOUTS, LoraFormat
from mm_core.weights.adapters.stored_names import Share, module_key, path_key, shares_in

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


def trained(pipeline: Path, folder: Path, name: str, adapter: dict) -> Path:
    """A run of one step with an adapter."""
    (photos := folder / "photos").mkdir(exist_ok=True)
    for number in range(2):
        Image.new("RGB", (64, 64), (100 * number, 0, 0)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text("a red square", encoding="utf-8")
    config = {
        "run": {"name": name, "dir": str(folder)},
        "task": {"type": "diffusers", "pipeline": str(pipeline), "text_encoder": {"dtype": "fp32"}},
        "data": {
            "train": {
                **{"type": "media_text", "sources": [{"annotations": str(photos)}], "num_frames": 1},
                **{"height": 64, "width": 64},
            },
            "loader": {"workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 0.01},
        "train": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 2, "adapters": [adapter]},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    mm_core.train(load_config(path))
    return folder / name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # FLUX's single blocks return views
def test_joined_loras_of_several_ranks_and_scales_change_what_single_ones_change(pipeline_of, tmp_path):
    pipeline, more = pipeline_of("FluxPipeline"), {"ranks": {"to_k": 2}, "alphas": {"to_q": 8}}
    run = trained(pipeline, tmp_path, "pissa", {"targets": "auto", "rank": 4, "init": "pissa", **more})
    single, joined = (
        changes(pipeline, *export_lora(run, tmp_path / f"{program}.safetensors", f"lora/{program}"))
        for program in ("comfyui", "kohya")
    )
    assert joined.keys() == single.keys()
    assert all((joined[name] - single[name]).abs().max() <= 1e-6 for name in single)
    assert single["transformer.transformer_blocks.0.attn.to_k"].abs().max() > 1e-3


@pytest.mark.parametrize("scale", [AdapterScale(4, 4.0, kind="lokr"), AdapterScale(4, 4.0, dora=True)])
def test_only_a_plain_lora_is_joined(scale):
    share = {"attn.to_q": Share("attn.qkv", range(4), 12)}
    with pytest.raises(MMError, match="to_q is no plain LoRA, and this layout joins the module with others"):
        joined_loras(LAYOUTS["lora/kohya"], {"attn.to_q": scale}, share, None, None)
