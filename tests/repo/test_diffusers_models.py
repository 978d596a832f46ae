"""examples/diffusers_models: each model equals Diffusers' own, and docs/wrapping-diffusers.md runs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import (
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.testing import check_predictor
from support.pages import blocks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/diffusers_models"
PAGE = ROOT / "docs/wrapping-diffusers.md"
CLASSES = {
    "sd3": SD3Transformer2DModel,
    "flux": FluxTransformer2DModel,
    "ltx": LTXVideoTransformer3DModel,
    "hunyuan_video": HunyuanVideoTransformer3DModel,
    "cogvideox": CogVideoXTransformer3DModel,
}
models = pytest.mark.parametrize("name", CLASSES)
CASES = [
    *((name, {}) for name in CLASSES),
    ("sd3", {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}),
    ("flux", {"guidance_embeds": False}),
    ("ltx", {"patch_size": 2, "patch_size_t": 2, "in_channels": 32, "out_channels": 32}),
    ("hunyuan_video", {"guidance_embeds": False}),
    ("cogvideox", {"use_rotary_positional_embeddings": True}),
    ("cogvideox", {"use_rotary_positional_embeddings": True, "patch_size_t": 2}),
]


def example(name: str, monkeypatch, **fields: object) -> nn.Module:
    """A tiny instance of an example's class."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    (component,) = module.mm_predictors()
    made: nn.Module = getattr(module, component.target.partition(":")[2])(**{**component.tiny, **fields})
    return made


def inputs_of(model, conditions: bool = True) -> dict[str, Tensor]:
    """Two samples, of unequal captions where the mask counts."""
    rng, masked = Randomness(5), model.text_padding == "masked"
    length = 6 if masked else model.text_padding[1]
    frames = 1 if getattr(model, "max_frames", None) == 1 else 4
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 3 if masked else length :] = False
    found = {
        "latents": rng.normal((2, model.in_channels, frames, 8, 6), "latents"),
        "timestep": torch.tensor([998.7, 12.5]),
        "text": rng.normal((2, length, model.text_dim), "text"),
        "text_mask": mask,
    }
    shapes = getattr(model, "condition_shapes", {})
    if "pooled" in shapes:
        found["pooled"] = rng.normal((2, *shapes["pooled"]), "pooled")
    if "guidance" in shapes:
        found["guidance"] = torch.tensor([3.5, 1.0])
    if model.__class__.__name__ == "LTX":
        found["fps"] = torch.tensor([24.0, 24.0])
    return found


def sd3(model, latents, timestep, text, text_mask, pooled):
    return model(latents[:, :, 0], text, pooled, timestep).sample[:, :, None]


def flux(model, latents, timestep, text, text_mask, pooled, guidance=None):
    batch, channels, _, height, width = latents.shape
    tokens = FluxPipeline._pack_latents(latents[:, :, 0], batch, channels, height, width)
    ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32)
    rows = torch.zeros(text.shape[1], 3)
    out = model(tokens, text, pooled, timestep / 1000, ids, rows, guidance).sample
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)[:, :, None]


def ltx(model, latents, timestep, text, text_mask, fps):
    patch = model.config.patch_size, model.config.patch_size_t
    sizes = [n // p for n, p in zip(latents.shape[2:], (patch[1], patch[0], patch[0]), strict=True)]
    tokens = LTXPipeline._pack_latents(latents, *patch)
    scale = (8 / float(fps[0]), 32, 32)
    out = model(tokens, text, timestep, text_mask, *sizes, rope_interpolation_scale=scale).sample
    return LTXPipeline._unpack_latents(out, *sizes, *patch)


def hunyuan_video(model, latents, timestep, text, text_mask, pooled, guidance=None):
    scale = None if guidance is None else guidance * 1000
    return model(latents, timestep, text, text_mask, pooled, scale).sample


class Pipeline:
    """What CogVideoX's pipeline needs to compute positions."""

    vae_scale_factor_spatial = 8

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer


def cogvideox(model, latents, timestep, text, text_mask):
    rotary = None
    if model.config.use_rotary_positional_embeddings:
        frames, height, width = latents.shape[2:]
        prepare = CogVideoXPipeline._prepare_rotary_positional_embeddings
        rotary = prepare(Pipeline(model), 8 * height, 8 * width, frames, torch.device("cpu"))
    clip = latents.permute(0, 2, 1, 3, 4)
    return model(clip, text, timestep, image_rotary_emb=rotary).sample.permute(0, 2, 1, 3, 4)


LIBRARY = {"sd3": sd3, "flux": flux, "ltx": ltx, "hunyuan_video": hunyuan_video, "cogvideox": cogvideox}
"""Each model called as Diffusers' pipeline calls it."""


@models
def test_an_example_has_at_most_60_lines(name: str) -> None:
    assert len((EXAMPLE / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_the_forward_and_its_gradients_are_those_of_diffusers(name, fields, monkeypatch) -> None:
    torch.manual_seed(0)
    model = example(name, monkeypatch, **fields).eval()
    library = CLASSES[name].from_config(model.config).eval()
    library.load_state_dict(model.state_dict())
    given = inputs_of(model)
    ours, theirs = model(**given), LIBRARY[name](library, **given)
    assert ours.shape == given["latents"].shape and ours.abs().max() > 0
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    wanted = dict(library.named_parameters())
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, wanted[key].grad), key


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # some of Diffusers' blocks return views
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_an_example_keeps_the_contract(name, fields, monkeypatch) -> None:
    check_predictor(lambda: example(name, monkeypatch, **fields))


def test_frame_rates_of_a_batch_may_differ(monkeypatch) -> None:
    model = example("ltx", monkeypatch).eval()
    given = inputs_of(model)
    given["fps"] = torch.tensor([24.0, 8.0])
    alone = {key: value[1:] for key, value in given.items()}
    with torch.no_grad():
        together = model(**given)
        torch.testing.assert_close(together[1:], model(**alone))
        assert not torch.allclose(together[1:], model(**{**alone, "fps": torch.tensor([24.0])}))


@pytest.mark.slow
@models
def test_weights_of_save_pretrained_come_in_and_go_out(name: str, tmp_path: Path, mm) -> None:
    config = EXAMPLE / f"{name}.yaml"
    fields = yaml.safe_load(config.read_text())["task"]["predictor"]
    library = CLASSES[name](**{key: value for key, value in fields.items() if key != "type"})
    library.save_pretrained(tmp_path / "library")
    run = ["--config", config, f"run.dir={tmp_path}"]
    done = mm("import", "--from", tmp_path / "library", *run, cwd=tmp_path)
    assert done.code == 0, done.err
    out = tmp_path / "out"
    done = mm("export", "--run", tmp_path / name, "--to", "diffusers", "--out", out, cwd=tmp_path)
    assert done.code == 0, done.err
    files = [
        load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (tmp_path / "library", out)
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    assert json.loads((out / "config.json").read_text())["_class_name"] == CLASSES[name].__name__
    loaded = CLASSES[name].from_pretrained(out)
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in library.state_dict().items())


@pytest.mark.slow
@models
def test_each_config_trains_and_samples(name: str, tmp_path: Path, mm) -> None:
    run = [f"run.dir={tmp_path}"]
    done = mm("train", "--config", EXAMPLE / f"{name}.yaml", *run, cwd=tmp_path)
    assert done.code == 0 and "done: step 3 of 3" in done.out + done.err, done.err
    done = mm("sample", "--run", tmp_path / name, "--prompt", "a red circle", "--out", tmp_path / "clips")
    assert done.code == 0, done.err
    assert [path for path in (tmp_path / "clips").iterdir() if path.suffix in (".mp4", ".png")]


@pytest.mark.slow
def test_the_kit_passes_each_file(mm) -> None:
    for name in (*CLASSES, "pooled_text"):
        done = mm("plugins", "test", name, "--path", EXAMPLE / f"{name}.py")
        assert done.code == 0 and "0 failures" in done.out, done.out


@pytest.mark.slow
def test_the_commands_of_the_page_run(run) -> None:
    lines = [line for b in blocks(PAGE) if b.language == "bash" for line in b.text.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        run(line.partition("  #")[0])


def test_the_table_of_the_page_is_right() -> None:
    rows = dict(re.findall(r"^\| \[`(\w+)\.py`\]\S* \| (\d+) \|", PAGE.read_text(), re.M))
    assert rows == {name: str(len((EXAMPLE / f"{name}.py").read_text().splitlines())) for name in CLASSES}
