"""Exports of adapters, separate and merged: both compute what the run computes."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file

from mm_core.contracts import Randomness
from mm_core.errors import MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from support.out_parts import model_of
from support.runs import DIT, VIDEO, config_of, language, published, trained
from support.tensors import close

IDS = torch.arange(24).reshape(2, 12)
ATTENTION = {"targets": ["q_proj", "v_proj"], "rank": 3, "alpha": 6.0}
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "out_channels": 12}
WAN |= {key: DIT[key] for key in ("num_layers", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")}
KINDS = {
    "lora": [ATTENTION],
    "dora": [{**ATTENTION, "dora": True}],
    "rslora": [{**ATTENTION, "rslora": True}],
    "two": [ATTENTION, {"name": "style", "targets": ["lm.inner.model.layers.{1}"], "rank": 2}],
    "two_dora": [{**ATTENTION, "dora": True}, {**ATTENTION, "name": "style", "dora": True}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_models_adapters(kind, tmp_path):
    """PEFT on the published model, Transformers on merged weights, and the run's own module agree."""
    origin = published(tmp_path, "qwen3")
    config = language(tmp_path, "qwen3", train={"epochs": 1, "adapters": KINDS[kind]})
    task = trained(config, origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "transformers", merge_adapters=True)
    library = type(model_of("qwen3"))
    plain = library.from_pretrained(origin)
    with torch.no_grad():
        ours = task.lm.inner(IDS).logits
        assert (ours - plain(IDS).logits).abs().max() > 0.01
        close(library.from_pretrained(merged)(IDS).logits, ours)
        names = [adapter.get("name", "default") for adapter in KINDS[kind]]
        places = [out] if len(names) == 1 else [out / name for name in names]
        model = PeftModel.from_pretrained(plain, places[0], adapter_name=names[0])
        for name, place in zip(names[1:], places[1:], strict=True):
            model.load_adapter(place, name)
        model.base_model.set_adapter(names)
        close(model.eval()(IDS).logits, ours)
    assert load_file(merged / "model.safetensors").keys() == load_file(origin / "model.safetensors").keys()
    assert not (out / "config.json").exists()
    card = (out / "README.md").read_text()
    assert "library_name: peft" in card and f"| adapter `{names[-1]}` | " in card and ", not merged |" in card
    assert f'from_pretrained(model, "{places[0].relative_to(tmp_path)}")' in card
    assert "merged into the weights" in (merged / "README.md").read_text()


def test_a_merge_is_computed_in_fp32(tmp_path):
    """Then cast once; tensors without adapters keep every bit."""
    origin = published(tmp_path, "qwen3")
    config = language(tmp_path, "qwen3", train={"epochs": 1, "adapters": [ATTENTION]})
    trained(config, origin)
    whole = export(tmp_path / "runs/tuned", tmp_path / "a", "transformers", merge_adapters=True)
    half = export(tmp_path / "runs/tuned", tmp_path / "b", "transformers", merge_adapters=True, dtype="bf16")
    given = load_file(origin / "model.safetensors")
    wide, narrow = load_file(whole / "model.safetensors"), load_file(half / "model.safetensors")
    for name, tensor in wide.items():
        assert torch.equal(narrow[name], tensor.to(torch.bfloat16))
        assert torch.equal(tensor, given[name]) != any(part in name for part in ("q_proj", "v_proj"))


def test_an_adapter_of_a_dit_in_diffusers(tmp_path):
    torch.manual_seed(4)
    origin = tmp_path / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    adapter = {"targets": ["to_q", "to_v", "to_out.0"], "rank": 4, "alpha": 2.0}
    config = config_of(tmp_path, VIDEO, train={"epochs": 1, "adapters": [adapter]})
    task = trained(config, origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "wan_transformer")
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "wan_transformer", merge_adapters=True)
    assert {path.name for path in out.iterdir()} == {"README.md", "pytorch_lora_weights.safetensors"}
    inputs = torch.randn(1, 12, 4, 8, 8), torch.tensor([500.0]), torch.randn(1, 5, 32)
    mask = torch.ones(1, 5, dtype=torch.bool)
    on_top = WanTransformer3DModel.from_pretrained(origin)
    on_top.load_lora_adapter(out, prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    with torch.no_grad():
        ours = task.predictor(*inputs, mask)
        close(on_top.eval()(*inputs).sample, ours)
        close(WanTransformer3DModel.from_pretrained(merged).eval()(*inputs).sample, ours)
        assert (WanTransformer3DModel.from_pretrained(origin)(*inputs).sample - ours).abs().max() > 0.01
    assert 'pipeline.load_lora_weights("out", weight_name=' in (out / "README.md").read_text()


def test_a_module_of_another_form_there_has_no_adapter_there(tmp_path):
    """Diffusers embeds patches by a convolution."""
    adapter = {"targets": ["patch_embedding", "to_q"], "rank": 4}
    config = config_of(tmp_path, VIDEO, train={"epochs": 1, "adapters": [adapter]})
    origin = tmp_path / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    task = trained(config, origin)
    with pytest.raises(MMError) as caught:
        export(tmp_path / "runs/tuned", tmp_path / "out", "wan_transformer")
    assert str(caught.value) == (
        "the adapter of patch_embedding cannot be written: the model's own library splits, reshapes or"
        " joins its weight, and an adapter belongs to a whole one\n"
        "  hint: export merged weights (--merge-lora), or leave the module out of the adapter's targets"
    )
    assert not (tmp_path / "out").exists()
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "wan_transformer", merge_adapters=True)
    inputs = torch.randn(1, 12, 4, 8, 8), torch.tensor([500.0]), torch.randn(1, 5, 32)
    with torch.no_grad():
        ours = task.predictor(*inputs, torch.ones(1, 5, dtype=torch.bool))
        close(WanTransformer3DModel.from_pretrained(merged).eval()(*inputs).sample, ours)


def test_a_dora_that_init_from_brings_is_as_it_was_trained(tmp_path):
    origin = published(tmp_path, "qwen3")
    section = {"epochs": 1, "adapters": KINDS["dora"]}
    config = language(tmp_path, "qwen3", train=section)
    trained(config, origin)
    begun = language(
        tmp_path, "qwen3", "begun", train=section, init_from={"path": str(tmp_path / "runs/tuned")}
    )
    task = build_task(begun)
    start = FileWeights(WeightSources(task, begun.init_from, begun.registry), begun.train.adapters)
    task.lm.to_empty(device="cpu")
    initialise(task.lm, "lm", Randomness(0), start.names)
    start.fill(task.state_dict())
    state = task.lm.state_dict()
    saved = {f"lm.{name}": torch.empty_like(tensor) for name, tensor in state.items()}
    CheckpointSource(tmp_path / "runs/tuned", "model").fill(saved)
    assert sum("lora_magnitude_vector" in name for name in saved) == 4
    assert all(torch.equal(state[name.removeprefix("lm.")], tensor) for name, tensor in saved.items())


def test_what_is_trained_beside_an_adapter_goes_with_it(tmp_path):
    """As PEFT's modules_to_save; merged weights contain it too."""
    origin = published(tmp_path, "qwen3")
    beside = ["lm.inner.lm_head", "lm.inner.model.norm"]
    section = {"epochs": 1, "adapters": [ATTENTION], "also_train": beside}
    task = trained(language(tmp_path, "qwen3", train=section), origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "transformers", merge_adapters=True)
    library = type(model_of("qwen3"))
    with torch.no_grad():
        ours = task.lm.inner(IDS).logits
        close(library.from_pretrained(merged)(IDS).logits, ours)
        close(PeftModel.from_pretrained(library.from_pretrained(origin), out).eval()(IDS).logits, ours)
    head = load_file(origin / "model.safetensors")["lm_head.weight"]
    assert not torch.equal(load_file(merged / "model.safetensors")["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("kind", "beside", "adapters", "format", "said"),
    [
        ("qwen3_tied", "lm.inner.model.embed_tokens", 1, "transformers", "and shared with another module"),
        ("qwen3", "lm.inner.lm_head", 2, "transformers", "but one of several adapters cannot contain it"),
        (
            "bert",
            "lm.inner.cls.predictions.bias",
            1,
            "safetensors",
            "inner.cls.predictions is trained beside the adapter without its inner.cls.predictions.transform",
        ),
    ],
)
def test_what_is_trained_beside_and_no_file_of_adapters_holds(kind, beside, adapters, format, said, tmp_path):
    origin = published(tmp_path, kind)
    target = "query" if kind == "bert" else "q_proj"
    given = [{"name": f"a{i}", "targets": [target], "rank": 2} for i in range(adapters)]
    section = {"epochs": 1, "adapters": given, "also_train": [beside]}
    task = trained(language(tmp_path, kind, train=section), origin)
    with pytest.raises(MMError) as caught:
        export(tmp_path / "runs/tuned", tmp_path / "out", format)
    assert said in str(caught.value) and "(--merge-lora)" in str(caught.value)
    assert not (tmp_path / "out").exists()
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "transformers", merge_adapters=True)
    with torch.no_grad():
        theirs = type(model_of(kind)).from_pretrained(merged).eval()
        close(theirs(IDS).logits, task.lm.inner(IDS).logits)


def test_diffusers_holds_nothing_beside_an_adapter(tmp_path):
    origin = tmp_path / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    section = {"epochs": 1, "adapters": [{"targets": ["to_q"]}], "also_train": ["predictor.proj_out"]}
    trained(config_of(tmp_path, VIDEO, train=section), origin)
    with pytest.raises(MMError) as caught:
        export(tmp_path / "runs/tuned", tmp_path / "out", "wan_transformer")
    assert str(caught.value) == (
        "--to: predictor.proj_out is trained beside the adapters, but this format cannot contain it\n"
        "  hint: export merged weights (--merge-lora)"
    )


def test_the_weights_below_stay_as_they_came(tmp_path):
    origin = published(tmp_path, "qwen3")
    config = language(tmp_path, "qwen3", train={"epochs": 1, "adapters": [ATTENTION]})
    saved, _ = import_weights(config, origin)
    given = load_file(origin / "model.safetensors")
    paths = {
        name: f"lm.inner.{name.replace('_proj.', '_proj.base_layer.')}"
        if "q_proj" in name or "v_proj" in name
        else f"lm.inner.{name}"
        for name in given
    }
    source = CheckpointSource(saved, "model")
    state = {path: torch.empty_like(given[name]) for name, path in paths.items()}
    source.fill(state)
    assert all(torch.equal(state[path], given[name]) for name, path in paths.items())


def test_what_has_no_adapter_and_what_can_hold_none(tmp_path):
    origin = published(tmp_path, "bert")
    import_weights(language(tmp_path), origin)
    with pytest.raises(MMError, match="this run trains no adapters, so there is nothing to merge"):
        export(tmp_path / "runs/tuned", tmp_path / "out", "transformers", merge_adapters=True)
    adapters = [{"targets": ["query"], "rank": 2}]
    adapted = language(tmp_path, name="other", train={"epochs": 1, "adapters": adapters})
    import_weights(adapted, origin)
    with pytest.raises(MMError) as caught:
        export(tmp_path / "runs/other", tmp_path / "out", "diffusers")
    assert str(caught.value) == (
        "--to: the format core/diffusers cannot store an adapter of 'lm', of class Wrapped\n"
        "  accepted: core/safetensors, core/transformers"
    )
    assert not (tmp_path / "out").exists()
    out = export(tmp_path / "runs/other", tmp_path / "out", "safetensors", dtype="bf16")
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["target_modules"] == sorted(
        f"inner.bert.encoder.layer.{i}.attention.self.query" for i in range(2)
    )
    kinds = {tensor.dtype for tensor in load_file(out / "adapter_model.safetensors").values()}
    assert kinds == {torch.bfloat16}
