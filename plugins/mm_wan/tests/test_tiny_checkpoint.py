"""Tiny checkpoints are whole: Diffusers loads and runs them, in the layout of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from mm_wan.encoders.vae import WanVAE
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image

import mm_core
from mm_core.errors import ContractError

ALWAYS = {"transformer", "vae", "text_encoder", "tokenizer", "scheduler"}


@pytest.mark.parametrize(
    ("variant", "kind", "more", "channels"),
    [
        ("t2v", WanPipeline, set(), 16),
        ("t2v_high_low", WanPipeline, {"transformer_2"}, 16),
        ("i2v", WanImageToVideoPipeline, {"image_encoder", "image_processor"}, 16),
        ("i2v_high_low", WanImageToVideoPipeline, {"transformer_2"}, 16),
        ("ti2v", WanPipeline, set(), 48),
    ],
)
def test_diffusers_loads_and_runs_it(tmp_path, variant, kind, more, channels):
    folder = make_tiny_checkpoint(tmp_path / "deep" / variant, variant)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == ALWAYS | more
    assert not any(path.suffix in {".bin", ".pt", ".pth"} for path in folder.rglob("*"))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 2_000_000
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline) is kind
    pipeline.set_progress_bar_config(disable=True)
    image = (
        {"image": Image.new("RGB", (32, 32), (200, 30, 30))} if "i2v" in variant and variant != "ti2v" else {}
    )
    video = pipeline(
        prompt="a red circle moves left", **image, height=32, width=32, num_frames=5, num_inference_steps=3,
        output_type="pt", generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip
    assert video.shape == (1, 5, 3, 32, 32) and video.isfinite().all() and video.std() > 0.01
    assert pipeline.vae.config.z_dim == pipeline.transformer.config.out_channels == channels
    assert pipeline.transformer.config.text_dim == pipeline.text_encoder.config.d_model


def test_variants_are_distinguished_as_the_published_ones_are(tmp_path):
    high_low = make_tiny_checkpoint(tmp_path / "a", "t2v_high_low")
    image = make_tiny_checkpoint(tmp_path / "b", "i2v", image_encoder=False)
    both = make_tiny_checkpoint(tmp_path / "c", "ti2v")
    assert index_of(high_low)["boundary_ratio"] == 0.875
    assert index_of(both)["expand_timesteps"] is True
    assert index_of(image)["_class_name"] == "WanImageToVideoPipeline"
    transformer = json.loads((image / "transformer" / "config.json").read_text())
    # 16 noisy channels, 16 of the image, 4 of the mask; Wan 2.2 has no image embeddings.
    assert (transformer["in_channels"], transformer["image_dim"]) == (36, None)
    assert not (image / "image_encoder").exists()
    one, other = ((high_low / name / "diffusion_pytorch_model.safetensors").read_bytes()
                  for name in ("transformer", "transformer_2"))  # fmt: skip
    assert len(one) == len(other) and one != other


def test_a_seed_is_a_checkpoint_byte_for_byte(tmp_path):
    state = torch.get_rng_state()
    first, again, other = (
        make_tiny_checkpoint(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))
    )
    assert torch.equal(torch.get_rng_state(), state)
    files = [path.relative_to(first) for path in sorted(first.rglob("*")) if path.is_file()]
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in files)
    weights = "diffusion_pytorch_model.safetensors"
    for part in ("vae", "transformer"):
        assert (first / part / weights).read_bytes() != (other / part / weights).read_bytes()


def test_latents_are_at_unit_scale(tmp_path):
    for variant in ("t2v", "ti2v"):
        vae = WanVAE(str(make_tiny_checkpoint(tmp_path / variant, variant)))
        mm_core.load_frozen(vae, "cpu")
        coarse = torch.randn(2, 3, 4, 5, 5, generator=torch.Generator().manual_seed(2))
        pixels = torch.nn.functional.interpolate(coarse, (9, 64, 64), mode="trilinear").tanh()
        posterior = vae.encode(pixels)
        assert posterior.mode().mean().abs() < 0.3 and 0.5 < posterior.mode().std() < 2
        noise = posterior.sample([torch.Generator().manual_seed(i) for i in range(2)]) - posterior.mode()
        assert 0 < noise.std() < 0.3


def test_the_tokenizer_has_the_words_and_spells_the_rest(tmp_path):
    tokenizer = WanPipeline.from_pretrained(make_tiny_checkpoint(tmp_path)).tokenizer
    assert tokenizer.tokenize("a red zebra") == ["▁a", "▁red", "▁", "z", "e", "b", "r", "a"]
    ids = tokenizer("a red circle", padding="max_length", max_length=6)["input_ids"]
    assert ids[3:] == [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.pad_token_id] == [1, 0, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a red circle"


def test_no_such_variant(tmp_path):
    with pytest.raises(ContractError, match="unknown variant 't3v' of a tiny checkpoint"):
        make_tiny_checkpoint(tmp_path, "t3v")
    assert not any(tmp_path.iterdir())


def index_of(folder: Path) -> dict:
    return json.loads((folder / "model_index.json").read_text())
