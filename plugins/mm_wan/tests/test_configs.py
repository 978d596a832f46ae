"""The plugin's YAMLs: every one checks, the full-size ones are the published models, the tiny ones run."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.config import WanTransformerConfig
from mm_wan.presets import PRESETS
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image
from safetensors.torch import load_file
from wan_configs import ROOT, checkpoint_of, config_at, render_clips, train
from wan_variants import forward_flops

from mm_core.cli.main import COMMANDS
from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from mm_core.interchange.export import export
from mm_core.plan import build_task, make_plan

CONFIGS = sorted((ROOT / "plugins/mm_wan/mm_wan/configs").glob("*.yaml"))
FULL = ["t2v_1_3b", "t2v_14b", "t2v_1_3b_lora", "i2v_14b", "i2v_14b_lora", "flf2v_14b", "ti2v_5b"]
FULL += ["ti2v_5b_lora"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_checks_and_is_linked(path):
    assert (ROOT / "configs/wan" / path.name).resolve() == path
    config = load_config(path)
    kind = "two_expert" if "a14b" in path.stem else "transformer"
    assert config.task.options["predictor"].type == f"wan/{kind}"
    assert config.run.name == f"wan_{path.stem}"


@pytest.mark.parametrize("path", [*CONFIGS, ROOT / "plugins/mm_wan/README.md"], ids=lambda path: path.stem)
def test_the_commands_beside_a_config_are_such_as_the_program_takes(path):
    commands = re.findall(r"^(?:#   )?mm(?:-| )(\w+) (.*)$", path.read_text(), re.MULTILINE)
    for name, rest in commands:
        if name == "plugins":
            continue
        parser = argparse.ArgumentParser(prog=f"mm {name}", allow_abbrev=False)
        import_module(COMMANDS[name][0]).configure(parser)
        parser.parse_intermixed_args(shlex.split(rest))
    assert "train" in dict(commands)


def test_the_config_class_needs_no_torch():
    command = "import sys, mm_wan.predictor.config, mm_wan.presets, mm_wan.plugin as p; p.mm_predictors();"
    command += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert WanTransformerConfig().preset is None


@pytest.mark.parametrize("name", FULL)
def test_a_full_size_config_plans_the_published_tensors(name):
    """Those of its preset, which tests/test_presets.py compares with what is published."""
    config = config_at(name)
    assert (config.train.base_dtype == "bf16") == (name.endswith("14b_lora") and shards_mixed())
    task = build_task(config)
    preset = config.task.options["predictor"].options["preset"]
    with torch.device("meta"):
        model = WanTransformer3DModel(**PRESETS[preset].architecture.fields)
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
    size = (2 if config.train.base_dtype else 4) * whole
    if name.endswith("lora"):
        # rank 32 at q, k, v, out of both attentions, k and v of images, both layers of the feed-forward
        width, inner = expected["blocks.0.ffn.net.0.proj.weight"][::-1]
        square = 8 + 2 * ("blocks.0.attn2.add_k_proj.weight" in expected)
        added = 32 * blocks * (square * 2 * width + 2 * (width + inner))
        assert sum(p.numel() for p in task.predictor.parameters() if p.requires_grad) == added
        whole, size = whole + added, size + 4 * added
        assert f"trained  {added:>15,} of {whole:,} parameters" in plan.render()
    assert plan.modules[0].parameters == whole
    assert plan.modules[0].trained == (added if name.endswith("lora") else whole)
    # Shards over 8 ranks: what does not divide into 8 rows costs a little more.
    assert plan.engine.parameter_bytes == pytest.approx(size / 8, rel=0.002)


@pytest.mark.parametrize(("name", "tokens"), [("i2v_14b", 257), ("flf2v_14b", 514)])
def test_operations_of_image_to_video_are_known_before_its_files_are_there(name, tokens):
    """With CLIP's tokens of each given frame; test_transformer.py compares the formula with torch's count."""
    config = config_at(name)
    data = config.data.train.options
    latents = (16, 1 + (data["num_frames"] - 1) // 4, data["height"] // 8, data["width"] // 8)
    preset = PRESETS[config.task.options["predictor"].options["preset"]]
    plan = make_plan(config, 8)
    assert plan.flops.forward == plan.global_batch_size * forward_flops(
        preset.architecture, latents, image=tokens
    )


@pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_a_lora_on_a_base_in_bf16_plans_with_the_files_of_its_encoders(tmp_path):
    """Encoders have a dtype of their own, which the check of the base took for the base's."""
    parts = {"predictor": "", "autoencoder": "/vae", "text_encoder": "/text_encoder"}
    parts["image_encoder"] = "/image_encoder"
    folder = make_tiny_checkpoint(tmp_path / "wan", "i2v")
    paths = [f"task.{name}.from_pretrained={folder}{place}" for name, place in parts.items()]
    config = config_at("i2v_14b_lora", "task.predictor.preset=null", *paths)
    ignored, task = config.engine.options["ignored_modules"], build_task(config)
    assert {"predictor", *ignored} == set(parts)
    make_plan(config, 8, task)
    for name in ("autoencoder", "text_encoder"):
        assert {p.dtype for p in getattr(task, name).parameters()} == {torch.bfloat16}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t2v_tiny", "t2v_tiny_lora", "i2v_tiny", "flf2v_tiny", "ti2v_tiny"])
def test_a_tiny_twin_trains_and_comes_out(name, tmp_path, monkeypatch):
    """By the commands in its first lines; the pipeline loads what comes out."""
    monkeypatch.chdir(tmp_path)
    render_clips(tmp_path / "data/real_clips")
    variant = name.partition("_")[0]
    origin = make_tiny_checkpoint(checkpoint_of(name), variant)
    images = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green")]
    files = [f"{place}.png" for place in range(2)]
    for file, image in zip(files, images, strict=True):
        image.save(file)
    given = dict(zip(IMAGES[variant], zip(images, files, strict=True), strict=False))
    listed = ", ".join(f"{key}s: [{file}]" for key, (_, file) in given.items())
    train(name, f"validation.samples={{prompts: [a red circle, a boat], steps: 2, {listed}}}")
    sampled = tmp_path / f"runs/wan_{name}/samples/step_00000003"
    assert len(list(sampled.glob("*.mp4"))) == 2
    out = export(tmp_path / f"runs/wan_{name}", tmp_path / "out", "wan/diffusers")
    kind = WanPipeline if variant == "t2v" else WanImageToVideoPipeline
    if name.endswith("lora"):
        pipeline = kind.from_pretrained(origin)
        pipeline.load_lora_weights(out)
        assert len(adapted_layers(pipeline)) == 2 * 10
    else:
        pipeline, begun = kind.from_pretrained(out), kind.from_pretrained(origin)
        before = dict(begun.transformer.named_parameters())
        moved = [n for n, p in pipeline.transformer.named_parameters() if not torch.equal(p, before[n])]
        assert len(moved) == len(before)
    shown = {key: image for key, (image, _) in given.items()}
    clip = pipeline(prompt="a red circle", **shown, num_frames=5, height=32, width=32, num_inference_steps=2)
    assert clip.frames.shape == (1, 5, 32, 32, 3)


@pytest.mark.slow
def test_a_lora_of_image_to_video_loads_in_its_pipeline(tmp_path, monkeypatch):
    """i2v_14b_lora.yaml's section, at the sizes of i2v_tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    render_clips(tmp_path / "data/real_clips")
    origin = make_tiny_checkpoint(checkpoint_of("i2v_tiny"), "i2v")
    (adapter,) = config_at("i2v_14b_lora").train.adapters
    targets = ",".join(adapter.targets)
    train("i2v_tiny", f"train.adapters=[{{targets: [{targets}], rank: 4, alpha: 4, init: gaussian}}]")
    out = export(tmp_path / "runs/wan_i2v_tiny", tmp_path / "out", "wan/diffusers")
    pipeline = WanImageToVideoPipeline.from_pretrained(origin)
    pipeline.load_lora_weights(out)
    assert len(adapted_layers(pipeline)) == 2 * 12
    stored = load_file(out / "pytorch_lora_weights.safetensors")
    assert all(stored[name].abs().sum() > 0 for name in stored if "add_k_proj" in name)


@pytest.mark.slow
def test_samples_that_could_not_be_made_end_the_run_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    render_clips(tmp_path / "data/real_clips")
    make_tiny_checkpoint(checkpoint_of("i2v_tiny"), "i2v")
    output = train("i2v_tiny", "validation.samples={prompts: [a boat]}", code=1)
    assert "the request contains no image, but the predictor needs the first frame" in output
    assert "Traceback" not in output and not list(tmp_path.glob("runs/*/checkpoints/step*"))
    assert (tmp_path / "runs/wan_i2v_tiny/metrics.jsonl").read_text() == ""


IMAGES = {"t2v": (), "i2v": ("image",), "flf2v": ("image", "last_image"), "ti2v": ("image",)}


def adapted_layers(pipeline) -> list[str]:
    (adapter,) = pipeline.get_active_adapters()
    return [n for n, m in pipeline.transformer.named_modules() if adapter in getattr(m, "lora_A", {})]
