"""The YAMLs of two experts: the full-size ones plan the published models, the tiny ones run and come out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import wan_configs as configs
from diffusers import (
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from mm_wan.presets import PRESETS
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image
from safetensors.torch import load_file

import mm_core
from mm_core.contracts import Randomness
from mm_core.device.torch_private import shards_mixed
from mm_core.interchange.export import export
from mm_core.plan import build_task, make_plan

FULL = {
    "t2v_a14b": "both",
    "t2v_a14b_high": "high",
    "t2v_a14b_low": "low",
    "t2v_a14b_lora": "both",
    "i2v_a14b": "both",
    "i2v_a14b_lora": "both",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train"), FULL.items())
def test_a_full_size_config_plans_the_published_tensors_of_what_it_trains(name, train):
    config = configs.config_at(name)
    task = build_task(config)
    preset = PRESETS[config.task.options["predictor"].options["preset"]]
    assert task.predictor.boundary == preset.boundary
    with torch.device("meta"):
        model = WanTransformer3DModel(**preset.architecture.fields)
    trained = ["high", "low"] if train == "both" else [train]
    expected = {f"{e}.{n}": tuple(t.shape) for e in trained for n, t in model.state_dict().items()}
    found = {
        name.replace(".base_layer.", "."): tuple(tensor.shape)
        for name, tensor in task.predictor.state_dict().items()
        if ".lora_" not in name
    }
    assert found == expected and all(tensor.is_meta for tensor in task.predictor.parameters())
    plan = make_plan(config, 8, task)
    blocks = [f"predictor.{expert}.blocks.{index}" for expert in trained for index in range(40)]
    assert plan.engine.recomputed == tuple(blocks)
    assert {*plan.engine.wrapped} == {*blocks, *(f"predictor.{expert}" for expert in trained)}
    whole = sum(math.prod(shape) for shape in expected.values())
    size = (2 if config.train.base_dtype else 4) * whole
    if name.endswith("lora"):
        assert config.train.base_dtype == ("bf16" if shards_mixed() else None)
        added = len(trained) * 32 * 40 * (8 * 2 * 5120 + 2 * (5120 + 13824))
        whole, size = whole + added, size + 4 * added
    # What rests is not built: it has no memory here, nor gradients or moments.
    assert plan.modules[0].parameters == whole
    assert plan.engine.parameter_bytes == pytest.approx(size / 8, rel=0.002)


SIZE = {"num_frames": 5, "height": 32, "width": 48}


def begun(name: str, tmp_path: Path, monkeypatch) -> Path:
    """The tiny pipeline that a twin begins with, and clips, where its config looks for them."""
    monkeypatch.chdir(tmp_path)
    configs.render_clips(tmp_path / "data/real_clips")
    return make_tiny_checkpoint(configs.checkpoint_of(name), f"{name.partition('_')[0]}_high_low")


def trained(name: str, *overrides: str) -> str:
    return configs.train(name, "train.steps=6", "checkpoint.every=6", "validation.every=6", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["both", "high", "low"])
def test_a_tiny_twin_trains_samples_and_comes_out(train, tmp_path, monkeypatch):
    """The pipeline has the experts that were trained, and the other one as it was."""
    name = {"both": "t2v_a14b_tiny"}.get(train, f"t2v_a14b_{train}_tiny")
    origin = begun(name, tmp_path, monkeypatch)
    trained(name, "validation.samples={prompts: [a red circle], steps: 2, guidance: [2.0, 3.0]}")
    assert list(tmp_path.glob("runs/*/samples/step_00000006/*.mp4"))
    out = export(tmp_path / f"runs/wan_{name}", tmp_path / "out", "wan/diffusers")
    pipeline, given = WanPipeline.from_pretrained(out), WanPipeline.from_pretrained(origin)
    for expert, part in (("high", "transformer"), ("low", "transformer_2")):
        before = dict(getattr(given, part).named_parameters())
        after = getattr(pipeline, part).named_parameters()
        moved = [n for n, parameter in after if not torch.equal(parameter, before[n])]
        assert len(moved) == (len(before) if train in ("both", expert) else 0), expert
    clip = pipeline(prompt="a red circle", **SIZE, num_inference_steps=2)
    assert clip.frames.shape == (1, 5, 32, 48, 3)


@pytest.mark.slow
def test_the_tiny_twin_of_image_to_video_trains_and_comes_out(tmp_path, monkeypatch):
    begun("i2v_a14b_tiny", tmp_path, monkeypatch)
    trained("i2v_a14b_tiny")
    out = export(tmp_path / "runs/wan_i2v_a14b_tiny", tmp_path / "out", "wan/diffusers")
    pipeline = WanImageToVideoPipeline.from_pretrained(out)
    assert pipeline.config.boundary_ratio == 0.9
    image = Image.new("RGB", (40, 30), "red")
    clip = pipeline(image=image, prompt="a red circle", **SIZE, num_inference_steps=2)
    assert clip.frames.shape == (1, 5, 32, 48, 3)


@pytest.mark.slow
def test_a_lora_of_two_experts_on_two_ranks_loads_in_its_pipeline(tmp_path, monkeypatch):
    """A clip of the run is the clip of the pipeline with both files."""
    origin = begun("t2v_a14b_tiny_lora", tmp_path, monkeypatch)
    trained("t2v_a14b_tiny_lora", "--nproc", "2")
    run = tmp_path / "runs/wan_t2v_a14b_tiny_lora"
    out = export(run, tmp_path / "out", "wan/diffusers")
    pipeline = WanPipeline.from_pretrained(origin)
    for file, second in (("pytorch_lora_weights", False), ("pytorch_lora_weights_2", True)):
        name = f"{file}.safetensors"
        pipeline.load_lora_weights(out, weight_name=name, load_into_transformer_2=second)
        stored = load_file(out / name)
        assert len(stored) == 2 * 2 * 10 and all(stored[n].abs().sum() > 0 for n in stored if "lora_B" in n)
    (ours,) = mm_core.sample(run, prompt="a red circle", seed=3, steps=3, guidance=[4.0, 3.0], **SIZE)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(pipeline.scheduler.config, flow_shift=5.0)
    found = pipeline(
        prompt="a red circle", **SIZE, num_inference_steps=3, guidance_scale=4.0, guidance_scale_2=3.0,
        latents=Randomness(3).normal((16, 2, 4, 6), "sample", 0)[None], output_type="pt",
    ).frames[0]  # fmt: skip
    torch.testing.assert_close(ours.pixels, found.transpose(0, 1) * 2 - 1, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_experts_on_two_ranks_go_on_bit_for_bit(tmp_path, monkeypatch):
    begun("t2v_a14b_tiny", tmp_path, monkeypatch)
    fewer = ("train.steps=4", "ema={decay: 0.9}", "--nproc", "2")
    said = configs.train("t2v_a14b_tiny", *fewer, "--verify-resume", "2")
    rows = [line.split() for line in said.splitlines() if line.startswith(("model", "optimizer", "ema"))]
    assert len(rows) == 3 and all(int(row[1]) == int(row[2]) > 0 for row in rows), said
