"""Weight formats on files written by Diffusers and Transformers themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from mm_custom_dit.model import CustomDiT
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError, PluginError
from mm_core.loading.matching import WeightMatch
from mm_core.modules.tying import tie, tied_names
from mm_core.plugin.registry import get_registry
from mm_core.weights import streaming
from mm_core.weights.fitting import candidate_layouts, formats_of
from support.tiny_models import Task

SIZES = {"num_layers": 2, "head_dim": 12, "freq_dim": 16, "ffn_dim": 32, "text_dim": 16}
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
WAN |= {name: SIZES[name] for name in ("num_layers", "freq_dim", "ffn_dim", "text_dim")}
QWEN = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def formats(only: str | None = None):
    return formats_of(get_registry(()), only)


def custom_dit() -> CustomDiT:
    return CustomDiT(num_heads=2, in_channels=4, out_channels=4, **SIZES)


def start(task: Task, path: Path, **fields) -> WeightMatch:
    """Weights of `path` in a task with allocated memory."""
    init = InitFromSection(path=str(path), **fields)
    parts = {name: task.get_submodule(name) for name in task.trainable}
    tied = tied_names(task)
    state = {n: t for n, t in task.state_dict().items() if n not in tied}
    found = WeightMatch(init, state, parts, formats(fields.get("format")))
    task.to_empty(device="cpu")
    tie(task, tied)
    found.fill(task.state_dict())
    return found


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.fixture
def wan(tmp_path) -> Path:
    torch.manual_seed(0)
    WanTransformer3DModel(**WAN).save_pretrained(tmp_path / "wan", max_shard_size="50KB")
    assert len(list((tmp_path / "wan").glob("*.safetensors"))) > 1
    return tmp_path / "wan"


def pipeline_of(folder: Path, wan: Path) -> Path:
    """The folder of a pipeline, whose other model has different names."""
    folder.mkdir()
    wan.rename(folder / "transformer")
    (folder / "vae").mkdir()
    save_file({"decoder.weight": torch.ones(2)}, folder / "vae" / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "W"], "vae": ["diffusers", "V"]}
    (folder / "model_index.json").write_text(
        json.dumps(index | {"boundary_ratio": None, "tokenizer": [None]})
    )
    return folder


@pytest.mark.parametrize("given", ["folder", "index", "pipeline"])
def test_a_diffusers_folder_begins_a_custom_dit_that_computes_the_same(wan, tmp_path, given):
    theirs = WanTransformer3DModel.from_pretrained(wan)
    path = {"folder": wan, "index": wan / "diffusion_pytorch_model.safetensors.index.json"}.get(given)
    path = pipeline_of(tmp_path / "pipeline", wan) if path is None else path
    task = Task(predictor=on_meta(custom_dit))
    report = start(task, path)
    assert (
        report.formats[0].startswith("custom_dit/wan_transformer") and not report.missing + report.unexpected
    )
    weights = theirs.state_dict()
    for name, tensor in task.predictor.state_dict().items():
        assert torch.equal(tensor, weights[name].reshape(tensor.shape)), name
    assert str(report).startswith(f"{len(weights)} tensors loaded (custom_dit/wan_transformer")
    assert ("in transformer)" in str(report)) is (given == "pipeline")


def test_a_model_of_the_library_and_its_wrapper_read_its_folder(wan):
    theirs = WanTransformer3DModel.from_pretrained(wan)
    for make in (WanTransformer3DModel, lambda **o: Wrapper(WanTransformer3DModel(**o))):
        task = Task(predictor=on_meta(lambda make=make: make(**WAN)))
        assert start(task, wan).formats == ("core/diffusers",)
        model = getattr(task.predictor, "inner", task.predictor)
        assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_folder_is_read_with_tied_weights_once(tmp_path, tied):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN, tie_word_embeddings=tied))
    theirs.save_pretrained(tmp_path)
    config = Qwen3Config.from_pretrained(tmp_path)
    task = Task(model=on_meta(lambda: AutoModelForCausalLM.from_config(config)))
    report = start(task, tmp_path)
    assert report.formats == ("core/transformers",) and not report.missing + report.unexpected
    weights = theirs.state_dict()
    for name in report.loaded:
        assert torch.equal(task.state_dict()[name], weights[name.removeprefix("model.")])
    assert ("model.lm_head.weight" in report.loaded) is not tied


def test_of_a_tied_weight_any_name_will_do(tmp_path):
    config = Qwen3Config(**QWEN, tie_word_embeddings=True)
    model = on_meta(lambda: AutoModelForCausalLM.from_config(config))
    held = {name: torch.ones(tensor.shape) for name, tensor in model.named_parameters()}
    held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config.to_json_string())
    report = start(Task(model=model), tmp_path)
    assert "model.model.embed_tokens.weight" in report.loaded and not report.missing + report.unexpected


@pytest.mark.parametrize("change", ["none", "cast", "far", "near"])
def test_two_stored_tensors_for_a_tied_weight_are_silent_only_where_they_are_equal(
    tmp_path, monkeypatch, change
):
    monkeypatch.setattr(streaming, "_CHUNK", 256)  # the last rows are not in the same piece as the first
    config = Qwen3Config(**QWEN, tie_word_embeddings=True)
    model = on_meta(lambda: AutoModelForCausalLM.from_config(config))
    generator = torch.Generator().manual_seed(0)
    held = {n: torch.randn(t.shape, generator=generator).bfloat16() for n, t in model.named_parameters()}
    head = held["model.embed_tokens.weight"].clone()
    if change == "near":
        head[-1, -1] *= 2
    held["lm_head.weight"] = head.float() if change == "cast" else -head if change == "far" else head
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config.to_json_string())
    task = Task(model=model)
    report = start(task, tmp_path)
    assert torch.equal(
        task.state_dict()["model.lm_head.weight"].bfloat16(), held["model.embed_tokens.weight"]
    )
    says = (
        ", the model shares one tensor for which the files contain two different ones"
        " (model.embed_tokens.weight is read, lm_head.weight is not)"
    )
    assert str(report).endswith("(core/transformers)" + (says if change in ("far", "near") else ""))


def test_what_does_not_fit_is_one_error_with_every_name(wan):
    with torch.device("meta"):
        narrow = CustomDiT(num_heads=2, in_channels=4, out_channels=4, **(SIZES | {"num_layers": 3}))
        other = CustomDiT(num_heads=2, in_channels=4, out_channels=4, **(SIZES | {"ffn_dim": 16}))
    with pytest.raises(CheckpointError) as caught:
        start(Task(predictor=narrow), wan)
    said = str(caught.value)
    assert said.startswith(f"{wan}: these weights do not fit the task: 27 missing: predictor.blocks.2.")
    with pytest.raises(CheckpointError) as caught:
        start(Task(predictor=other), wan)
    assert "6 misshapen: predictor.blocks.0.ffn.net.0.proj.weight (32x24 in the file, 16x24 in the" in str(
        caught.value
    )
    loose = start(Task(predictor=narrow), wan, strict=False)
    assert len(loose.missing) == 27 and not loose.unexpected


def test_a_format_by_name_is_the_only_one_tried(wan):
    report = start(Task(predictor=on_meta(custom_dit)), wan, format="wan_transformer")
    assert report.formats == ("custom_dit/wan_transformer",)
    with pytest.raises(CheckpointError, match="no weight format can read 'predictor' from this folder"):
        start(Task(predictor=on_meta(custom_dit)), wan, format="transformers")
    with pytest.raises(PluginError, match="no weight_format is named 'difusers'"):
        start(Task(predictor=on_meta(custom_dit)), wan, format="difusers")


def test_pickles_are_refused_by_name_and_nothing_runs(wan, tmp_path):
    for file in wan.glob("*.safetensors*"):
        file.unlink()
    mark = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return exec, (f"open({str(mark)!r}, 'w').close()",)

    (wan / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(
        CheckpointError, match="the weights here are pickle files, which can run code: diffusion"
    ):
        start(Task(predictor=on_meta(custom_dit)), wan)
    (wan / "diffusion_pytorch_model.bin").rename(wan / "diffusion_pytorch_model.safetensors")
    with pytest.raises(
        CheckpointError, match="not a complete safetensors file: it is truncated, or a different"
    ):
        start(Task(predictor=on_meta(custom_dit)), wan)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("../wan/a.safetensors", "this index lists '../wan/a.safetensors', which is outside its folder"),
        ("a.bin", "this index lists 'a.bin', which is not a safetensors file"),
        ("a.safetensors", "files listed in this index are missing: a.safetensors"),
    ],
)
def test_an_index_alone_is_an_error_with_its_reason(file, says, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError) as caught:
        start(Task(predictor=on_meta(custom_dit)), tmp_path)
    assert says in str(caught.value)


def test_a_pipeline_of_another_model_is_called_that(wan, tmp_path):
    pipeline = pipeline_of(tmp_path / "pipeline", wan)
    task = Task(predictor=on_meta(lambda: nn.Linear(2, 2)))
    with pytest.raises(CheckpointError) as caught:
        start(task, pipeline)
    assert str(caught.value).startswith(
        f"{pipeline}: none of this folder's weights belong to 'predictor': it contains a different model"
    )
    assert "core/diffusers" in caught.value.hint


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"_class_name"', "[" * 100_000, "\x00"])
def test_a_hostile_config_is_simply_not_recognised(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert not any(known.recognises(tmp_path) for known in formats().values())
    (tmp_path / "model_index.json").write_text(text)
    assert candidate_layouts(tmp_path, "predictor", custom_dit(), {"w": (1,)}, formats()) == []


def two_transformers(tmp_path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A pipeline with two models of one architecture and different numbers."""
    folder, held = tmp_path / "two", []
    for seed, name in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(seed)
        model = WanTransformer3DModel(**WAN)
        model.save_pretrained(folder / name)
        held.append(model.state_dict())
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "W"],
        "transformer_2": ["diffusers", "W"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder, held


def test_of_two_models_alike_each_component_reads_the_one_of_its_name(tmp_path):
    folder, held = two_transformers(tmp_path)
    make = lambda: on_meta(lambda: WanTransformer3DModel(**WAN))  # noqa: E731
    task = Task(transformer=make(), transformer_2=make())
    report = start(task, folder)
    for component, weights in zip((task.transformer, task.transformer_2), held, strict=True):
        assert all(torch.equal(t, weights[n]) for n, t in component.state_dict().items())
    assert report.formats == ("core/diffusers in transformer", "core/diffusers in transformer_2")
    alone = Task(transformer_2=make())
    start(alone, folder)
    assert all(torch.equal(t, held[1][n]) for n, t in alone.transformer_2.state_dict().items())
    with pytest.raises(CheckpointError, match="could be in any of these folders: transformer, transf"):
        start(Task(predictor=make()), folder)
    with pytest.raises(CheckpointError, match="'a' and 'b' would both be read from the same file"):
        start(Task(a=make(), b=make()), folder / "transformer")


def test_an_adapter_is_no_weights_to_begin_with(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(
            CheckpointError,
            match=r"this is an adapter, not weights\n  hint: to start from an adapter, set train\.adapters",
        ):
            start(Task(predictor=on_meta(custom_dit)), path)
