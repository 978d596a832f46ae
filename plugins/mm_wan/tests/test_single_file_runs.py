"""Runs of Wan whose every part is one file, by commands; their exports hold the file's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.single_file import UMT5_KEYS, vae_keys
from mm_wan.testing import make_tiny_checkpoint
from safetensors.torch import load_file, save_file
from test_single_file import renamed
from wan_configs import environment

from mm_core.config.load import load_config
from mm_core.contracts import SampleRequest
from mm_core.errors import CheckpointError, MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plan import build_task
from support import warm
from support.runs import load_task
from support.tensors import same, stored

STARTS = {"wan": "", "comfyui": "model.diffusion_model.", "diffusers": None}


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "t2v")


def transformer(wan: Path) -> dict[str, torch.Tensor]:
    return load_file(wan / "transformer/diffusion_pytorch_model.safetensors")


def named(weights: dict[str, torch.Tensor], names: str) -> dict[str, torch.Tensor]:
    """The weights by the names of a program."""
    if names == "diffusers":
        return weights
    return {STARTS[names] + name: tensor for name, tensor in renamed(weights, ORIGINAL_KEYS).items()}


def config_at(
    folder: Path, wan: Path, name: str = "tuned", predictor: dict | None = None, **init_from: object
) -> Path:
    """The YAML of a run whose encoders are one file each. A step of it changes nothing: its rate is 0."""
    vae = AutoencoderKLWan.from_pretrained(wan / "vae")
    torch.save(renamed(vae.state_dict(), vae_keys(vae.config)), folder / "Wan2.1_VAE.pth")
    umt5 = load_file(wan / "text_encoder/model.safetensors")
    torch.save(renamed(umt5, UMT5_KEYS), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    sizes = WanTransformer3DModel.load_config(wan / "transformer").items()
    fields = {key: value for key, value in sizes if not key.startswith("_") and value is not None}
    document = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "task": {
            "type": "text_to_video",
            "predictor": {"type": "wan/transformer", **(fields if predictor is None else predictor)},
            "autoencoder": {"type": "wan/vae", "from_pretrained": str(folder / "Wan2.1_VAE.pth")},
            "text_encoder": {
                "type": "wan/umt5",
                "from_pretrained": str(folder / "models_t5_umt5-xxl-enc-bf16.pth"),
                "tokenizer": str(wan / "tokenizer"),
            },
            "scheduler": {"type": "wan/flow_match"},
        },
        "data": {
            "train": {"type": "shapes", "num_frames": 5, "height": 32, "width": 32},
            "loader": {"workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 0.0},
        "train": {"steps": 1},
        **({"init_from": init_from} if init_from else {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def mm(*command: object) -> str:
    found = warm.mm(*command, env=environment())
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", STARTS)
def test_a_transformer_in_one_file_begins_runs_and_comes_back_bit_by_bit(names, tmp_path, wan):
    weights = {name: tensor.bfloat16() for name, tensor in transformer(wan).items()}
    file = tmp_path / "wan2.1_t2v_bf16.safetensors"
    save_file(named(weights, names), file)
    begun = config_at(tmp_path, wan, "begun", path=str(file))
    printed = mm("train", "--config", begun)
    assert f"{len(weights)} tensors loaded" in printed
    imported = config_at(tmp_path, wan, "imported")
    assert f"{len(weights)} tensors loaded" in mm("import", "--from", file, "--config", imported)
    for name in ("begun", "imported"):
        for format, back in (("wan/original", "wan"), ("wan/diffusers", "diffusers")):
            out = export(tmp_path / "runs" / name, tmp_path / name / back, format, dtype="bf16")
            same(stored(out), named(weights, back))
    # What it wrote in Wan-AI's names is such a file again.
    again = tmp_path / "begun/wan/diffusion_pytorch_model.safetensors"
    mm("import", "--from", again, "--config", config_at(tmp_path, wan, "again"), "--format", "wan/file")
    out = export(tmp_path / "runs/again", tmp_path / "out", "wan/diffusers", dtype="bf16")
    same(stored(out), weights)


def started(config: Path) -> FileWeights:
    run = load_config(config)
    return FileWeights(WeightSources(build_task(run), run.init_from, run.registry))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"prefixes": {"": "predictor"}, "strict": False}])
def test_init_from_and_an_import_refuse_scales_by_name(suffix, options, tmp_path, wan):
    """Also where names may be left over: without its scale a code is another weight."""
    codes = {
        name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor
        for name, tensor in transformer(wan).items()
    }
    path, scale = tmp_path / f"wan2.1_fp8_scaled{suffix}", "blocks.0.ffn.0.scale_weight"
    state = {**(named(codes, "comfyui") if not options else codes), scale: torch.ones(1)}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    with pytest.raises(CheckpointError) as caught:
        started(config_at(tmp_path, wan, path=str(path), **options))
    assert f"quantised with scales ({scale})" in caught.value.what and caught.value.where == str(path)
    if not options:
        with pytest.raises(CheckpointError, match="quantised with scales"):
            import_weights(load_config(config_at(tmp_path, wan)), path)


def test_a_pickle_of_tensors_begins_a_run_and_its_code_does_not_run(tmp_path, wan):
    """Under any name: init_from reads it without code, as it reads other models' files."""
    weights, path = transformer(wan), tmp_path / "my_transformer.pth"
    torch.save(named(weights, "wan"), path)
    assert len(started(config_at(tmp_path, wan, path=str(path))).names) == len(weights)
    path.write_bytes(f"\x80\x02cos\nsystem\n(S'touch {tmp_path / 'owned'}'\ntR.".encode("latin-1"))
    with pytest.raises(CheckpointError, match="refused without loading it"):
        started(config_at(tmp_path, wan, path=str(path)))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("shape", [None, (), (0,), (0, 0), (1,), (1,) * 6], ids=str)
def test_odd_tensors_in_a_transformers_file_are_a_sentence(shape, tmp_path, wan):
    """Each tensor is missing, a single number, empty, or of other dimensions."""
    state, path = named(transformer(wan), "wan"), tmp_path / "odd.safetensors"
    config = config_at(tmp_path, wan, predictor={"from_pretrained": str(path), "num_attention_heads": 2})
    for odd in (name for name in state if not name.startswith("blocks.1.")):
        left = {name: tensor for name, tensor in state.items() if name != odd}
        save_file(left if shape is None else {**left, odd: torch.zeros(shape)}, path)
        with pytest.raises(CheckpointError) as caught:
            started(config)
        assert caught.value.where == str(path), odd


# -- two experts -----------------------------------------------------------------------------------

PARTS = {"high": "transformer", "low": "transformer_2"}
FOLDERS = {"high": "high_noise_model", "low": "low_noise_model"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "pair", "t2v_high_low")


def expert_of(pair: Path, name: str) -> dict[str, torch.Tensor]:
    return stored(pair / PARTS[name])


def in_files(folder: Path, pair: Path) -> dict[str, str]:
    """The two as ComfyUI publishes them, beside a LoRA of one."""
    folder.mkdir()
    save_file({"x.lora_A.weight": torch.zeros(1, 2)}, folder / "wan2.2_t2v_high_noise_lora.safetensors")
    files = {name: folder / f"wan2.2_t2v_{name}_noise_14B_fp16.safetensors" for name in PARTS}
    for (name, file), names in zip(files.items(), ("comfyui", "wan"), strict=True):
        save_file(named(expert_of(pair, name), names), file)
    return {name: str(file) for name, file in files.items()}


def experts(files: object, train: str = "both", **options: object) -> dict[str, object]:
    heads = {"num_attention_heads": 2} if isinstance(files, dict) else {}
    return {"type": "wan/two_expert", "from_pretrained": files, "train": train, **heads, **options}


@pytest.mark.slow
@pytest.mark.parametrize("train", ["both", "high", "low"])
def test_a_file_of_each_expert_begins_a_run_and_comes_back_bit_by_bit(train, tmp_path, pair):
    files = in_files(tmp_path / "models", pair)
    trained = list(PARTS) if train == "both" else [train]
    config = config_at(tmp_path, pair, "files", experts(files, train))
    assert " tensors loaded (wan/file in wan2.2_t2v_" in mm("train", "--config", config)
    for format, parts, names in (("wan/diffusers", PARTS, "diffusers"), ("wan/original", FOLDERS, "wan")):
        out = export(tmp_path / "runs/files", tmp_path / "out" / format, format)
        for name in trained:
            same(stored(out / parts[name]), named(expert_of(pair, name), names))
    # The expert that is not trained is read for samples.
    folder = load_config(config_at(tmp_path, pair, "folder", experts(str(pair), train)))
    import_weights(folder, pair)
    request = SampleRequest(
        ("a white horse",), steps=2, guidance=2.0, num_frames=5, height=32, width=32, fps=8
    )
    clips = [
        load_task(run, tmp_path / "runs" / run.run.name, "model").sample(request)[0].pixels
        for run in (folder, load_config(config))
    ]
    assert torch.equal(*clips)


def test_files_of_experts_that_could_be_taken_for_one_another_are_refused(tmp_path, pair):
    files = in_files(tmp_path / "models", pair)
    moved = Path(files["low"]).rename(tmp_path / "low_noise.safetensors")
    for wrong, what in (
        (
            {"high": files["low"], "low": files["high"]},
            "by its name, this is not the file of the expert 'high'",
        ),
        ({**files, "low": str(moved)}, "the files of the two experts are in different folders"),
        (
            {**files, "low": str(Path(files["low"]).with_name("flow.safetensors"))},
            "not the file of the expert 'low'",
        ),
        ({"high": files["high"]}, "the key 'low' is missing"),
    ):
        with pytest.raises(MMError, match=what):
            build_task(load_config(config_at(tmp_path, pair, predictor=experts(wrong))))
