"""LoRA files for ComfyUI, kohya's scripts, Diffusers and PEFT: out, checked, in again, and in Diffusers."""

from __future__ import annotations

import re
from pathlib import Path

import expert_runs
import pytest
import torch
import wan_runs
from diffusers import WanPipeline, WanTransformer3DModel
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mm_core.cli.main import main
from mm_core.errors import MMError
from mm_core.interchange import export as exporting
from mm_core.interchange.lora import export_lora
from mm_core.plan import build_task
from mm_core.weights.adapters.inject import AdapterWeights
from mm_core.weights.adapters.layouts import LAYOUTS
from mm_core.weights.fitting import formats_of
from support import runs

pytestmark = pytest.mark.slow


TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 40, "freq_dim": 16}
ADAPTER = {"targets": ["predictor.blocks.{*}"], "rank": 4, "alpha": 2.0}
FILES = [label for label in LAYOUTS if label != "lora/peft"]
FIRST = {
    "lora/comfyui": "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    "lora/kohya": "lora_unet_blocks_0_self_attn_q.lora_down.weight",
    "lora/diffusers": "transformer.blocks.0.attn1.to_q.lora_A.weight",
    "lora/peft": "base_model.model.blocks.0.attn1.to_q.lora_A.weight",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path, torch.nn.Module]:
    """A pipeline, the folder of a run that trained a LoRA of its transformer, and the run's task."""
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(4)
    model = WanTransformer3DModel(**TINY, **wan_runs.CHANNELS, cross_attn_norm=True, rope_max_seq_len=32)
    pipeline = wan_runs.pipeline_at(folder / "tiny-wan", model)
    config = wan_runs.config_of(
        folder, {"from_pretrained": str(pipeline)}, "style", train={"epochs": 1, "adapters": [ADAPTER]}
    )
    task = runs.trained(config, pipeline)
    return pipeline, folder / "runs/style", task


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """The folder of a run that trained a LoRA of both experts, and the run's task."""
    folder = tmp_path_factory.mktemp("pair")
    origin = expert_runs.pair_at(folder / "t2v")
    config = expert_runs.config_of(folder, origin, adapters=[{"targets": ["to_q", "to_v"], "rank": 3}])
    return folder / "runs/pair", runs.trained(config, origin)


def adapters_of(task: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in task.predictor.named_parameters() if "lora_" in n}


def read_back(path: Path, run: Path, config_of, *args, **kwargs) -> dict[str, torch.Tensor]:
    """The adapter tensors of a new run that starts from a file, and its scales."""
    config = config_of(*args, **kwargs)
    task = build_task(config)
    formats = formats_of(config.registry)
    weights = AdapterWeights(task, config.train.adapters, formats)
    state = {n: torch.empty(p.shape) for n, p in task.named_parameters() if n in weights.names}
    weights.fill(state)
    return {name.removeprefix("predictor."): tensor for name, tensor in state.items()}


def single(path: Path, pipeline: Path, place: Path) -> dict[str, torch.Tensor]:
    train = {"epochs": 1, "adapters": [{"from": str(path)}]}
    return read_back(
        path, place, wan_runs.config_of, place, {"from_pretrained": str(pipeline)}, "again", train=train
    )


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("label", LAYOUTS)
def test_a_lora_comes_back_bit_by_bit(label, run, tmp_path):
    pipeline, folder, task = run
    out = tmp_path / ("style" if label == "lora/peft" else "style.safetensors")
    files = export_lora(folder, out, label)
    tensors = next(path for path in files if path.suffix == ".safetensors")
    assert FIRST[label] in load_file(tensors)
    assert equal(single(out, pipeline, tmp_path), adapters_of(task))


@pytest.mark.parametrize("label", FILES)
def test_diffusers_makes_the_same_clip_of_it(label, run, tmp_path):
    pipeline, folder, _task = run
    export_lora(folder, tmp_path / "style.safetensors", label)
    merged = exporting.export(folder, tmp_path / "merged", "wan/diffusers", merge_adapters=True)
    plain, loaded = WanPipeline.from_pretrained(pipeline), WanPipeline.from_pretrained(pipeline)
    loaded.load_lora_weights(tmp_path, weight_name="style.safetensors")
    expected = wan_runs.clip(WanPipeline.from_pretrained(merged))
    torch.testing.assert_close(wan_runs.clip(loaded), expected, rtol=0, atol=1e-4)
    assert (wan_runs.clip(plain) - expected).abs().max() > 0.01


def test_peft_loads_what_is_trained_beside_an_adapter(run, tmp_path, monkeypatch):
    pipeline, _, _ = run
    beside = ["predictor.blocks.0.attn2.to_q", "predictor.proj_out"]
    section = {"epochs": 1, "adapters": [{"targets": ["attn1"], "rank": 2}], "also_train": beside}
    config = wan_runs.config_of(tmp_path, {"from_pretrained": str(pipeline)}, "beside", train=section)
    task = runs.trained(config, pipeline)
    folder = tmp_path / "runs/beside"
    export_lora(folder, tmp_path / "style", "lora/peft")
    model = WanTransformer3DModel.from_pretrained(pipeline / "transformer")
    loaded = PeftModel.from_pretrained(model, tmp_path / "style").eval()
    latents, timestep, text = torch.randn(1, 12, 2, 2, 4), torch.tensor([500.0]), torch.randn(1, 512, 32)
    with torch.no_grad():
        ours = task.predictor(latents, timestep, text, torch.ones(1, 512, dtype=torch.bool))
        torch.testing.assert_close(loaded(latents, timestep, text).sample, ours, rtol=0, atol=1e-4)
    write = exporting.write_shards

    def faulty(place, shards, produce, *rest):
        return write(place, shards, lambda name: produce(name) * ("proj_out" not in name), *rest)

    monkeypatch.setattr(exporting, "write_shards", faulty)
    with pytest.raises(MMError, match=r"in 2 modules: proj_out.\w+ \(values\), proj_out.\w+ \(values\)"):
        export_lora(folder, tmp_path / "other", "lora/peft")


@pytest.mark.parametrize("label", LAYOUTS)
def test_each_expert_has_its_own_file(label, pair, tmp_path):
    folder, task = pair
    peft = label == "lora/peft"
    files = export_lora(folder, tmp_path / "out" / ("style" if peft else "style.safetensors"), label)
    if not peft:
        assert [path.name for path in files] == ["style_high.safetensors", "style_low.safetensors"]
    top, parts = files[0].parent, files
    if peft:
        parts = [path.parent for path in files if path.suffix == ".safetensors"]
        top = parts[0].parent
        assert [path.name for path in parts] == ["high", "low"]
    apart = [{"name": f"of_{n}", "from": str(path)} for n, path in enumerate(parts)]
    for adapters in ([{"from": str(top)}], apart):
        config = expert_runs.config_of(tmp_path, folder.parents[1] / "t2v", "again", adapters=adapters)
        formats = formats_of(config.registry)
        again = build_task(config)
        weights = AdapterWeights(again, config.train.adapters, formats)
        state = {n: torch.empty(p.shape) for n, p in again.named_parameters() if n in weights.names}
        weights.fill(state)
        found = {re.sub(r"of_\d", "default", n.removeprefix("predictor.")): t for n, t in state.items()}
        assert equal(found, adapters_of(task))


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize(
    ("label", "prefix", "other"),
    [
        ("lora/comfyui", "diffusion_model.", "pipe.dit."),
        ("lora/comfyui", "diffusion_model.", ""),
        ("lora/kohya", "lora_unet_", "lora_unet__"),
        ("lora/diffusers", "transformer.", "transformer."),
        ("lora/comfyui", "diffusion_model.", "base_model.model."),
    ],
)
def test_other_programs_prefixes_are_read(default, label, prefix, other, run, tmp_path):
    pipeline, folder, task = run
    (path,) = export_lora(folder, tmp_path / "style.safetensors", label)
    tensors = {other + name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    if default:
        tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    with safe_open(path, "pt") as held:
        save_file(tensors, tmp_path / "other.safetensors", held.metadata())
    assert equal(single(tmp_path / "other.safetensors", pipeline, tmp_path), adapters_of(task))


def test_modules_of_a_text_encoder_in_a_kohya_file_are_counted_and_named(run, tmp_path):
    pipeline, folder, _ = run
    (path,) = export_lora(folder, tmp_path / "style.safetensors", "lora/kohya")
    module = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    factors = {f"{module}.lora_down.weight": torch.ones(4, 8), f"{module}.lora_up.weight": torch.ones(8, 4)}
    save_file(load_file(path) | factors, tmp_path / "both.safetensors")
    with pytest.raises(MMError) as caught:
        single(tmp_path / "both.safetensors", pipeline, tmp_path)
    assert f"1 of the 21 modules in this adapter match no linear layer of predictor: {module}\n" in str(
        caught.value
    )
    assert str(caught.value).endswith("hint: these are of a text encoder: write the file again without them")


def test_the_header_names_base_rank_alpha_and_trigger_words(run, tmp_path):
    _, folder, _ = run
    (path,) = export_lora(folder, tmp_path / "s.safetensors", "lora/comfyui", trigger_words=["ohwx", "ink"])
    with safe_open(path, "pt") as held:
        texts = held.metadata()
    assert texts.pop("mm_core.version")
    assert texts == {
        "format": "pt",
        "modelspec.title": "style",
        "modelspec.trigger_phrase": "ohwx, ink",
        "ss_base_model_version": "tiny-wan",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "2",
    }


def rows_missing(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As if the half of one rank had not been gathered."""
    second = name.endswith(("blocks.1.ffn.0.lora_B.weight", "blocks_1_ffn_0.lora_up.weight"))
    return torch.cat([tensor[: len(tensor) // 2], 0 * tensor[len(tensor) // 2 :]]) if second else tensor


def zero_module(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return 0 * tensor if "blocks.0.self_attn.k.lora_B" in name else tensor


def alpha_dropped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(4.0) if name.endswith(".alpha") else tensor


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (rows_missing, "in 1 module: blocks.1.ffn.net.0.proj (values of lora_B)\n"),
        (zero_module, "in 1 module: blocks.0.attn1.to_k (values of lora_B)\n"),
        (alpha_dropped, "in 20 modules: blocks.0.attn1.to_q (scale 1 instead of 0.5), "),
    ],
)
def test_a_file_that_differs_from_the_run_is_found_at_export(fault, sentence, run, tmp_path, monkeypatch):
    _, folder, _ = run
    write = exporting.write_shards

    def faulty(place, shards, produce, *rest):
        return write(place, shards, lambda name: fault(name, produce(name)), *rest)

    monkeypatch.setattr(exporting, "write_shards", faulty)
    with pytest.raises(MMError) as caught:
        export_lora(folder, tmp_path / "style.safetensors", "lora/comfyui")
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_swapped_experts_are_found_at_export(pair, tmp_path, monkeypatch):
    folder, _ = pair
    write, held = exporting.write_shards, {}

    def swapped(place, shards, produce, stem, *rest):
        other = held.setdefault("first", produce)
        return write(place, shards, other, stem, *rest)

    monkeypatch.setattr(exporting, "write_shards", swapped)
    with pytest.raises(MMError, match=r"style_low: the written LoRA differs .* in 8 modules: low\.blocks"):
        export_lora(folder, tmp_path / "style.safetensors", "lora/comfyui")


def test_the_command_writes_the_file_and_refuses_what_it_cannot(run, tmp_path, capsys):
    _, folder, _ = run
    out = tmp_path / "style.safetensors"
    args = ["export", "--run", str(folder), "--to", "lora/comfyui", "--out", str(out)]
    assert main(args) == 0
    assert "1 file, loaded again and equal to the checkpoint" in capsys.readouterr().out
    assert main(args) == 1 and "exists already" in capsys.readouterr().err
    for label, name, sentence in (
        ("lora/peft", "a.safetensors", "lora/peft is a folder with two files"),
        ("lora/kohya", "a", "lora/kohya is one file for each expert"),
        ("lora/comfy", "a", "no layout of LoRA files is called 'lora/comfy'"),
    ):
        assert main([*args[:4], label, "--out", str(tmp_path / name)]) == 1
        assert sentence in capsys.readouterr().err
