"""Wan's models in one file, as Wan-AI and ComfyUI publish them, against the folders of the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.single_file import UMT5_KEYS, vae_config, vae_keys
from mm_wan.testing import make_tiny_checkpoint
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

import mm_core
from mm_core.config.load import load_config
from mm_core.errors import CheckpointError
from mm_core.plan import make_plan
from mm_core.weights import KeyMap

SIZED = re.compile(
    r"^(encoder|decoder)\.conv1\.weight|^conv[12]\.weight|residual\.2\.weight|^shared|embedding"
    r"|relative_attention_bias|blocks?\.0\..*(\.q|wi_1|fc1)\.weight"
)
"""The names of tensors whose shapes are sizes of a model."""
PROMPTS = ["a red circle moves left", "a white horse"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "t2v")


@pytest.fixture(scope="module")
def ti2v(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "ti2v", "ti2v")


def renamed(state: dict[str, torch.Tensor], keys: KeyMap) -> dict[str, torch.Tensor]:
    return {keys.renamed(name) or name: tensor.clone() for name, tensor in state.items()}


def published_vae() -> tuple[AutoencoderKLWan, dict[str, torch.Tensor]]:
    """An autoencoder with the published numbers of levels and blocks, and its file as Wan-AI names it."""
    torch.manual_seed(0)
    model = AutoencoderKLWan(base_dim=4)
    return model, renamed(model.state_dict(), vae_keys(model.config))


def test_the_names_of_the_autoencoder_are_those_that_diffusers_converts():
    model, file = published_vae()
    assert {"encoder.downsamples.0.residual.2.weight", "decoder.upsamples.14.residual.6.bias"} <= file.keys()
    converted = convert_wan_vae_to_diffusers(dict(file))
    own = model.state_dict()
    assert converted.keys() == own.keys()
    assert all(torch.equal(converted[name], own[name]) for name in own)


def test_the_names_of_the_transformer_are_those_that_diffusers_converts(wan):
    own = WanTransformer3DModel.from_pretrained(wan / "transformer").state_dict()
    file = renamed(own, ORIGINAL_KEYS)
    converted = convert_wan_transformer_to_diffusers(
        {f"model.diffusion_model.{k}": t for k, t in file.items()}
    )
    assert all(torch.equal(converted[name], own[name]) for name in own) and converted.keys() == own.keys()


def test_sizes_come_from_the_shapes(tmp_path, wan, ti2v):
    for model in (
        AutoencoderKLWan(base_dim=4),
        AutoencoderKLWan.from_pretrained(wan / "vae"),
        AutoencoderKLWan.from_pretrained(ti2v / "vae"),
    ):
        path = tmp_path / "vae.safetensors"
        save_file(renamed(model.state_dict(), vae_keys(model.config)), path)
        found = AutoencoderKLWan(**vae_config(path)).config
        measured = {"latents_mean", "latents_std"}
        same = {key: value for key, value in model.config.items() if not key.startswith("_")}
        for key in same.keys() - measured:
            assert found[key] == (list(same[key]) if isinstance(same[key], tuple) else same[key]) or (
                key == "decoder_base_dim" and same[key] is None
            ), key
        assert len(found["latents_mean"]) == model.config.z_dim


@pytest.mark.parametrize("name", ["Wan2.1_VAE.pth", "wan_2.1_vae.safetensors", "Wan2.2_VAE.pth"])
def test_an_autoencoder_in_one_file_encodes_and_decodes_as_its_folder(name, tmp_path, wan, ti2v):
    folder = (ti2v if "2.2" in name else wan) / "vae"
    model = AutoencoderKLWan.from_pretrained(folder)
    state = renamed(model.state_dict(), vae_keys(model.config))
    path = tmp_path / name
    save_file(state, path) if name.endswith("safetensors") else torch.save(state, path)
    pixels = torch.rand(1, 3, 5, 64, 64) * 2 - 1
    moments, clips = [], []
    for place in (folder, path):
        vae = mm_core.build(
            "autoencoder", {"type": "wan/vae", "from_pretrained": str(place), "norm_latents": False}
        )
        assert vae.missing_files() == [] and vae.stride == (4, 16, 16) if "2.2" in name else (4, 8, 8)
        mm_core.load_frozen(vae, "cpu")
        moments.append(vae.encode(pixels).moments)
        clips.append(vae.decode(vae.encode(pixels).mode()))
    assert torch.equal(*moments) and torch.equal(*clips)


@pytest.mark.parametrize("name", ["models_t5_umt5-xxl-enc-bf16.pth", "umt5_xxl_fp16.safetensors"])
def test_a_text_encoder_in_one_file_encodes_as_its_folder(name, tmp_path, wan):
    state = load_file(wan / "text_encoder/model.safetensors")
    path = tmp_path / name
    if name.endswith(".pth"):
        torch.save(renamed(state, UMT5_KEYS), path)
    else:  # ComfyUI's has Transformers' names, and the tokenizer as a tensor
        save_file({**state, "spiece_model": torch.zeros(9, dtype=torch.uint8)}, path)
    hidden = []
    options = {"type": "wan/umt5", "tokenizer": str(wan / "tokenizer"), "dtype": "fp32", "max_length": 16}
    for place in (wan / "text_encoder", path):
        encoder = mm_core.build("text_encoder", {**options, "from_pretrained": str(place)})
        assert encoder.missing_files() == []
        mm_core.load_frozen(encoder, "cpu")
        hidden.append(encoder.encode(*encoder.tokenizer()(PROMPTS))[0])
    assert torch.equal(*hidden) and hidden[0].abs().sum() > 0
    # The bias of distant tokens depends on a number that no shape tells; the published one is the class's.
    assert UMT5EncoderModel.config_class().relative_attention_max_distance == 128


@pytest.mark.parametrize("start", ["", "model.diffusion_model."])
def test_a_transformer_in_one_file_is_that_of_its_folder(start, tmp_path, wan):
    own = WanTransformer3DModel.from_pretrained(wan / "transformer").state_dict()
    path = tmp_path / "wan2.1_t2v_bf16.safetensors"
    save_file({start + name: tensor for name, tensor in renamed(own, ORIGINAL_KEYS).items()}, path)
    options = {"type": "wan/transformer", "from_pretrained": str(path), "num_attention_heads": 2}
    found = mm_core.build("predictor", options)
    folder = mm_core.build("predictor", {"type": "wan/transformer", "from_pretrained": str(wan)})
    assert found.architecture == folder.architecture


def test_a_file_that_is_not_there_is_missing_in_a_plan(tmp_path, wan):
    document = {
        "run": {"name": "x"},
        "task": {
            "type": "text_to_video",
            "predictor": {"type": "wan/transformer", "from_pretrained": str(wan)},
            "autoencoder": {"type": "wan/vae", "from_pretrained": str(tmp_path / "wan_2.1_vae.safetensors")},
            "text_encoder": {
                "type": "wan/umt5",
                "from_pretrained": str(tmp_path / "umt5_xxl_fp16.safetensors"),
                "tokenizer": str(wan / "tokenizer"),
            },
            "scheduler": {"type": "wan/flow_match"},
        },
        "data": {"train": {"type": "shapes", "num_frames": 5, "height": 32, "width": 32}},
        "train": {"steps": 1},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    plan = make_plan(load_config(config), 1)
    assert {Path(path).name for path in plan.missing_files} == {
        "wan_2.1_vae.safetensors",
        "umt5_xxl_fp16.safetensors",
    }


def test_what_is_not_published_is_refused_by_name(tmp_path, wan):
    def built(kind: str, name: str, path: Path) -> object:
        more = {"tokenizer": str(wan / "tokenizer")} if kind == "text_encoder" else {}
        options = {"type": name, "from_pretrained": str(path), **more}
        return mm_core.load_frozen(mm_core.build(kind, options), "cpu")

    pickled = tmp_path / "my_vae.pth"
    pickled.write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(CheckpointError, match="this is a pickle file"):
        built("autoencoder", "wan/vae", pickled)
    hostile = pickled.rename(tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(CheckpointError, match="refused without loading it"):
        built("autoencoder", "wan/vae", hostile)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    for kind, name, what in (
        ("autoencoder", "wan/vae", "autoencoder"),
        ("text_encoder", "wan/umt5", "UMT5 encoder"),
        ("predictor", "wan/transformer", "transformer"),
    ):
        with pytest.raises(
            CheckpointError, match=f"this file holds no Wan {what}, by the names and shapes in it"
        ):
            built(kind, name, other)
    scaled = tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save_file({"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, scaled)
    with pytest.raises(CheckpointError, match=r"quantised with scales \(scaled_fp8\)"):
        built("text_encoder", "wan/umt5", scaled)


@pytest.mark.parametrize("shape", [None, (), (0,), (0, 0), (1,), (1,) * 6], ids=str)
@pytest.mark.parametrize(("kind", "name"), [("autoencoder", "wan/vae"), ("text_encoder", "wan/umt5")])
def test_odd_tensors_in_one_file_are_a_sentence(kind, name, shape, tmp_path, wan, ti2v):
    """Each tensor that sizes come from is missing, a single number, empty, or of other dimensions."""
    vaes = [AutoencoderKLWan.from_pretrained(place / "vae") for place in (wan, ti2v)]
    umt5 = load_file(wan / "text_encoder/model.safetensors")
    states = {
        "autoencoder": [renamed(vae.state_dict(), vae_keys(vae.config)) for vae in vaes],
        "text_encoder": [umt5, renamed(umt5, UMT5_KEYS)],
    }
    path = tmp_path / "odd.safetensors"
    options = {"type": name, "from_pretrained": str(path)}
    if kind == "text_encoder":
        options["tokenizer"] = str(wan / "tokenizer")
    for state in states[kind]:
        for odd in (key for key in state if SIZED.search(key)):
            left = {key: tensor for key, tensor in state.items() if key != odd}
            save_file(left if shape is None else {**left, odd: torch.zeros(shape)}, path)
            with pytest.raises(CheckpointError) as caught:
                mm_core.load_frozen(mm_core.build(kind, options), "cpu")
            assert caught.value.where == str(path), odd
