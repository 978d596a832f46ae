"""Two experts on disk: in and out of both layouts bit by bit, one trained or both, whole or as adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import expert_runs as runs
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.two_expert import TwoExpert
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.store import CheckpointStore
from mm_core.contracts import Randomness, SampleRequest
from mm_core.errors import CheckpointError
from mm_core.interchange.export import export
from mm_core.interchange.export_plan import own_state
from mm_core.interchange.import_weights import import_weights
from support.runs import load_task
from support.tensors import same, stored

FILE = "diffusion_pytorch_model.safetensors"
ORIGINAL = {"high": "high_noise_model", "low": "low_noise_model"}


PARTS = {"wan/diffusers": runs.PARTS, "wan/original": ORIGINAL}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return runs.pair_at(tmp_path_factory.mktemp("pair") / "t2v")


@pytest.fixture(scope="module")
def original(pair, tmp_path_factory) -> Path:
    """The same two as Wan-AI publishes them."""
    top = tmp_path_factory.mktemp("original")
    for name, folder in ORIGINAL.items():
        source = pair / runs.PARTS[name]
        fields = WanTransformer3DModel.load_config(source)
        (top / folder).mkdir()
        tensors = load_file(source / FILE)
        save_file({ORIGINAL_KEYS.renamed(key): t for key, t in tensors.items()}, top / folder / FILE)
        config = {
            "_class_name": "WanModel",
            "dim": fields["num_attention_heads"] * fields["attention_head_dim"],
            "eps": fields["eps"],
            "ffn_dim": fields["ffn_dim"],
            "freq_dim": fields["freq_dim"],
            "in_dim": fields["in_channels"],
            "model_type": "t2v",
            "num_heads": fields["num_attention_heads"],
            "num_layers": fields["num_layers"],
            "out_dim": fields["out_channels"],
            "text_len": 512,
        }
        (top / folder / "config.json").write_text(json.dumps(config))
    return top


@pytest.mark.parametrize("train", ["both", "high", "low"])
@pytest.mark.parametrize("out_in", ["wan/diffusers", "wan/original"])
@pytest.mark.parametrize("begun_in", ["wan/diffusers", "wan/original"])
def test_in_and_out_is_bit_equal(pair, original, begun_in, out_in, train, tmp_path):
    origins = {"wan/diffusers": pair, "wan/original": original}
    runs.imported(tmp_path, origins[begun_in], train=train, encoders=pair)
    out = export(tmp_path / "runs/pair", tmp_path / "out", out_in)
    trained = ["high", "low"] if train == "both" else [train]
    # The expert that was not trained lies beside the other where the run began with both in this layout.
    present = ["high", "low"] if begun_in == out_in else trained
    folders = {path.name for path in out.iterdir()} & {*ORIGINAL.values(), *runs.PARTS.values()}
    assert folders == {PARTS[out_in][name] for name in present}
    for name in present:
        same(stored(out / PARTS[out_in][name]), stored(origins[out_in] / PARTS[out_in][name]))
    if out_in == "wan/diffusers":
        for name in present:
            loaded, info = WanTransformer3DModel.from_pretrained(
                out / runs.PARTS[name], output_loading_info=True
            )
            assert not any(info.values()) and loaded.config.num_layers == 2
    if begun_in == out_in == "wan/diffusers":
        assert WanPipeline.from_pretrained(out).config.boundary_ratio == 0.875
    if len(present) == 2:
        again = TwoExpert(from_pretrained=str(out), train="high")
        assert again.weights_from.format == out_in


def test_an_original_folder_begins_a_run_that_samples(pair, original, tmp_path):
    """The clip of Diffusers' layout; of a run that trains one expert, too, with the other one from there."""
    request = SampleRequest(
        ("a red circle",), steps=3, guidance=2.0, num_frames=5, height=32, width=48, fps=8
    )
    clips = []
    for name, top, train in (("a", pair, "both"), ("b", original, "both"), ("c", original, "low")):
        _, _, task = runs.imported(tmp_path, top, name, train=train, encoders=pair)
        clips.append(task.sample(request)[0].pixels)
    assert torch.equal(clips[0], clips[1]) and torch.equal(clips[0], clips[2])


def test_weights_of_one_expert_alone_do_not_begin_a_pair(pair, tmp_path):
    config = runs.config_of(tmp_path, pair)
    lone = shutil.copytree(pair / "transformer", tmp_path / "transformer")
    with pytest.raises(CheckpointError, match="transformer_2"):
        import_weights(config, lone)
    assert not list((tmp_path / "runs").rglob("step_*"))


# -- adapters --------------------------------------------------------------------------------------

LORA = {"targets": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj"], "rank": 4, "alpha": 6.0}
PROMPT = "a red circle moves left"


def tuned(place: Path, pair: Path, train: str, targets: list[str] | None = None):
    """The task of a run whose adapters have moved, saved as its step 5."""
    adapter = LORA if targets is None else {**LORA, "targets": targets}
    config, saved, task = runs.imported(place, pair, train=train, adapters=[adapter])
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in task.predictor.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    state = {f"predictor.{n}": t for n, t in own_state(task.predictor).items()}
    store = CheckpointStore(place / "runs/pair", 9)
    store.save(5, {"model": state}, {"seed": 1}, (saved / "config.yaml").read_text())
    store.close()
    return load_task(config, place / "runs/pair/checkpoints/step_00000005", "model")


def clip_of(pipeline: WanPipeline) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    noise = Randomness(3).normal((16, 2, 4, 6), "sample", 0)[None]
    frames = pipeline(
        prompt=PROMPT, negative_prompt="", num_frames=5, height=32, width=48, num_inference_steps=4,
        guidance_scale=3.0, latents=noise, output_type="pt",
    ).frames[0]  # fmt: skip
    return frames.transpose(0, 1) * 2 - 1


@pytest.mark.slow
@pytest.mark.parametrize("train", ["both", "high", "low"])
def test_an_adapter_for_each_expert_is_loaded_by_the_pipeline(pair, tmp_path, train):
    task = tuned(tmp_path, pair, train)
    out = export(f"{tmp_path}/runs/pair@5", tmp_path / "out", "wan/diffusers")
    files = {"high": "pytorch_lora_weights.safetensors", "low": "pytorch_lora_weights_2.safetensors"}
    trained = ["high", "low"] if train == "both" else [train]
    assert {path.name for path in out.iterdir()} == {"README.md", *(files[name] for name in trained)}
    pipeline = WanPipeline.from_pretrained(pair)
    plain = clip_of(pipeline)
    for name in trained:
        pipeline.load_lora_weights(out, weight_name=files[name], load_into_transformer_2=name == "low")
        said = f'weight_name="{files[name]}"{", load_into_transformer_2=True" if name == "low" else ""})'
        assert said in (out / "README.md").read_text()
    request = SampleRequest(
        (PROMPT,), seed=3, steps=4, guidance=3.0, num_frames=5, height=32, width=48, fps=8
    )
    (ours,) = task.sample(request)
    adapted = clip_of(pipeline)
    torch.testing.assert_close(ours.pixels, adapted, rtol=0, atol=1e-4)
    assert (adapted - plain).abs().max() > 1e-2
    merged = export(f"{tmp_path}/runs/pair@5", tmp_path / "merged", "wan/diffusers", merge_adapters=True)
    assert (clip_of(WanPipeline.from_pretrained(merged)) - adapted).abs().max() < 1e-4


def test_an_adapter_of_one_expert_of_two_is_one_file(pair, tmp_path):
    tuned(tmp_path, pair, "low", ["predictor.low.blocks.{*}.attn1.to_q"])
    out = export(f"{tmp_path}/runs/pair@5", tmp_path / "out", "wan/diffusers")
    assert {path.name for path in out.iterdir()} == {"README.md", "pytorch_lora_weights_2.safetensors"}
    assert all(".attn1.to_q." in name for name in stored(out))
