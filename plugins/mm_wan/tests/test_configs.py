"""The plugin's YAMLs: every one checks, the full-size ones are the published models, the tiny ones run."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from mm_wan.config_predictor import WanTransformerConfig
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.presets import PRESETS
from mm_wan.testing import make_tiny_checkpoint

import mm_core
from mm_core.config.load import load_config
from mm_core.plan import build_task, make_plan
from mm_core.train.exporting import export

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "plugins/mm_wan/mm_wan/configs").glob("*.yaml"))
FULL = ["t2v_1_3b", "t2v_14b", "t2v_1_3b_lora"]

# transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and -14B-Diffusers, without its private keys.
SHARED = {
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
PUBLISHED = {
    "wan2.1-t2v-1.3b": {**SHARED, "ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
    "wan2.1-t2v-14b": {**SHARED, "ffn_dim": 13824, "num_attention_heads": 40, "num_layers": 40},
}
# Parameters of Diffusers' class with these configs; the papers' round figures are 1.3B and 14B.
COUNTS = {
    "wan2.1-t2v-1.3b": (825, 1_418_996_800),
    "wan2.1-t2v-14b": (1095, 14_288_491_584),
    "wan2.1-i2v-14b-480p": (1303, 16_394_878_784),
    "wan2.1-i2v-14b-720p": (1303, 16_394_878_784),
    "wan2.1-flf2v-14b-720p": (1304, 16_395_536_704),
    "wan2.2-t2v-a14b": (1095, 14_288_491_584),
    "wan2.2-i2v-a14b": (1095, 14_288_901_184),
    "wan2.2-ti2v-5b": (825, 4_999_787_712),
}


def config_at(name: str, *overrides: str):
    return load_config(ROOT / f"configs/wan/{name}.yaml", list(overrides))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_checks_and_is_linked(path):
    assert (ROOT / "configs/wan" / path.name).resolve() == path
    config = load_config(path)
    assert config.task.options["predictor"].type == "wan/transformer"
    assert config.run.name == f"wan_{path.stem}"


def test_the_config_class_needs_no_torch():
    command = "import sys, mm_wan.config_predictor, mm_wan.presets, mm_wan.plugin as p; p.mm_predictors();"
    command += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert WanTransformerConfig().preset is None


@pytest.mark.parametrize("preset", COUNTS)
def test_a_presets_tensors_are_those_of_diffusers_class(preset):
    """Their names, shapes and number; for the two text-to-video models from the published config.json."""
    fields = PUBLISHED.get(preset, PRESETS[preset].fields)
    with torch.device("meta"):
        model = WanTransformer3DModel(**fields)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert (len(shapes), sum(p.numel() for p in model.parameters())) == COUNTS[preset]
    if preset in PUBLISHED:
        fields = {name: list(v) if isinstance(v, tuple) else v for name, v in PRESETS[preset].fields.items()}
        assert fields == {**PUBLISHED[preset], "pos_embed_seq_len": None}


@pytest.mark.parametrize("name", FULL)
def test_a_full_size_config_plans_the_published_tensors(name):
    config = config_at(name)
    task = build_task(config)
    preset = config.task.options["predictor"].options["preset"]
    with torch.device("meta"):
        model = WanTransformer3DModel(**PUBLISHED[preset])
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {
        name.replace(".base_layer.", "."): tuple(tensor.shape)
        for name, tensor in task.predictor.state_dict().items()
        if ".lora_" not in name
    }
    assert found == expected
    assert all(tensor.is_meta for tensor in task.predictor.parameters())
    original = ORIGINAL_KEYS.stored_shapes(expected)
    assert original["blocks.0.self_attn.q.weight"] == expected["blocks.0.attn1.to_q.weight"]
    assert original["head.modulation"] == (1, 2, expected["proj_out.weight"][1])
    plan = make_plan(config, 8, task)
    blocks = len(model.blocks)
    paths = tuple(f"predictor.blocks.{index}" for index in range(blocks))
    assert plan.engine.wrapped == plan.engine.recomputed == paths
    whole = sum(math.prod(shape) for shape in expected.values())
    if name.endswith("lora"):
        # rank 32 at q, k, v, out of both attentions, and at both layers of the feed-forward
        width, inner = expected["blocks.0.ffn.net.0.proj.weight"][::-1]
        added = 32 * blocks * (8 * 2 * width + 2 * (width + inner))
        assert sum(p.numel() for p in task.predictor.parameters() if p.requires_grad) == added
        whole += added
    assert plan.modules[0].parameters == whole
    # Shards of float32 over 8 ranks: what does not divide into 8 rows costs a little more.
    assert plan.engine.parameter_bytes == pytest.approx(4 * whole / 8, rel=0.002)


def render_clips(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "examples/real_clips/prepare.py")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t2v_tiny", "t2v_tiny_lora"])
def test_a_tiny_twin_trains_and_comes_out(name, tmp_path, monkeypatch):
    """As its first lines say; what comes out, WanPipeline loads."""
    monkeypatch.chdir(tmp_path)
    render_clips(tmp_path / "data/real_clips")
    make_tiny_checkpoint("ckpt/wan_tiny")
    fewer = ["train.steps=3", "checkpoint.every=3", "validation.every=3", "data.loader.workers=0"]
    command = [
        sys.executable,
        "-m",
        "mm_core.cli.main",
        "train",
        "--config",
        f"{ROOT}/configs/wan/{name}.yaml",
    ]
    core = str(Path(mm_core.__file__).parents[1])  # the one of this process, wherever it lies
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": core}
    found = subprocess.run([*command, *fewer], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    out = export(tmp_path / f"runs/wan_{name}", tmp_path / "out", "wan/diffusers")
    if name.endswith("lora"):
        pipeline = WanPipeline.from_pretrained("ckpt/wan_tiny")
        pipeline.load_lora_weights(out)
        (adapter,) = pipeline.get_active_adapters()
        layers = [n for n, m in pipeline.transformer.named_modules() if adapter in getattr(m, "lora_A", {})]
        assert len(layers) == 2 * 10
    else:
        pipeline, given = WanPipeline.from_pretrained(out), WanPipeline.from_pretrained("ckpt/wan_tiny")
        before = dict(given.transformer.named_parameters())
        moved = [n for n, p in pipeline.transformer.named_parameters() if not torch.equal(p, before[n])]
        assert len(moved) == len(before)
    clip = pipeline("a red circle moves left", num_frames=5, height=32, width=32, num_inference_steps=2)
    assert clip.frames.shape == (1, 5, 32, 32, 3)
