"""Weights imported and exported again: every bit is the same, and their libraries load them."""

from __future__ import annotations

import json
import os

import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.reading import load_model_only, open_checkpoint
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError, MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from support.out_parts import model_of
from support.runs import DIT, VIDEO, config_of, language, published
from support.tensors import same


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "bert"])
def test_a_transformers_model_in_and_out(kind, tmp_path):
    origin = published(tmp_path, kind)
    saved, notes = import_weights(language(tmp_path, kind), origin)
    assert saved == tmp_path / "runs/tuned/checkpoints/step_00000000"
    assert "(core/transformers)" in notes[0]
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    same(load_file(out / "model.safetensors"), load_file(origin / "model.safetensors"))
    library = type(model_of(kind))
    loaded, info = library.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    original = library.from_pretrained(origin)
    same(dict(loaded.state_dict()), dict(original.state_dict()))
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original.eval()(ids).logits)


def test_custom_dit_in_and_out(tmp_path):
    """As plain files, and as the Wan transformer of Diffusers, whose patches are a convolution."""
    torch.manual_seed(4)
    names = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "out_channels": 12}
    names |= {key: DIT[key] for key in ("num_layers", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")}
    origin = tmp_path / "wan"
    WanTransformer3DModel(**names, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    import_weights(config_of(tmp_path, VIDEO), origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "wan_transformer")
    file = "diffusion_pytorch_model.safetensors"
    same(load_file(out / file), load_file(origin / file))
    loaded = WanTransformer3DModel.from_pretrained(out)
    same(dict(loaded.state_dict()), dict(WanTransformer3DModel.from_pretrained(origin).state_dict()))
    plain = export(tmp_path / "runs/tuned", tmp_path / "plain", "safetensors")
    import_weights(config_of(tmp_path, VIDEO, "again"), plain)
    again = export(tmp_path / "runs/again", tmp_path / "again", "safetensors")
    same(load_file(again / "model.safetensors"), load_file(plain / "model.safetensors"))


def test_shards_of_another_dtype_load_in_it(tmp_path):
    """Files have their own dtype; the library's config does not override it."""
    origin = published(tmp_path, "qwen3_tied", torch.bfloat16)
    import_weights(language(tmp_path, "qwen3_tied"), origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers", dtype="bf16", max_shard="4kB")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    found = {name: t for file in files for name, t in load_file(out / file).items()}
    same(found, load_file(origin / "model.safetensors"))
    loaded = type(model_of("qwen3")).from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    wide = export(tmp_path / "runs/tuned", tmp_path / "wide", "transformers")
    assert type(model_of("qwen3")).from_pretrained(wide).dtype == torch.float32


def test_the_average_and_what_has_none(tmp_path):
    """Buffers come from the model."""
    origin = published(tmp_path, "bert")
    config = language(tmp_path, "bert", ema={"decay": 0.5})
    saved, _ = import_weights(config, origin)
    model = load_file(origin / "model.safetensors")
    state = {f"lm.inner.{name}": torch.empty_like(tensor) for name, tensor in model.items()}
    load_model_only(saved, state, "ema")
    same({name.removeprefix("lm.inner."): tensor for name, tensor in state.items()}, model)
    store = CheckpointStore(tmp_path / "runs/tuned", 2)
    averaged = {name: tensor + 1 for name, tensor in state.items()}
    parts = {"model": state, "ema": {k: v for k, v in averaged.items() if not k.endswith("bias")}}
    store.save(7, parts, {"seed": 1}, (saved / "config.yaml").read_text())
    store.close()
    for weights, added in (("model", 0), ("ema", 1), ("auto", 1)):
        out = export(f"{tmp_path}/runs/tuned@7", tmp_path / weights, "transformers", weights=weights)
        for name, tensor in load_file(out / "model.safetensors").items():
            assert torch.equal(tensor, model[name] + added * (not name.endswith("bias"))), name


def test_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path / "none.json"))
    origin = published(tmp_path, "bert")
    cached = tmp_path / "hub/models--some-lab--small-bert/snapshots/abc"
    cached.parent.mkdir(parents=True)
    origin.rename(cached)
    import_weights(
        language(tmp_path, "bert", optimizer={"type": "adamw", "lr": "${oc.env:RATE,0.01}"}), cached
    )
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers", dtype="bf16")
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "base_model": "some-lab/small-bert",
        "tags": ["mm_core", "parts"],
    }
    assert 'model = BertForMaskedLM.from_pretrained("out")' in text
    assert "| started from the weights of | some-lab/small-bert at abc |" in text
    assert "| dtype | bfloat16 (" in text
    assert "lr: ${oc.env:RATE,0.01}" in text
    assert str(tmp_path) not in text and os.sep + "tmp" not in text


def test_an_import_records_what_it_was_made_of(tmp_path):
    saved, _ = import_weights(language(tmp_path), published(tmp_path, "bert"))
    facts = open_checkpoint(saved).facts
    assert facts["step"] == 0 and facts["imported"]["path"].endswith("published-bert")
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["data"] == {}


def test_an_import_needs_neither_the_kernel_nor_the_compiler_of_its_run(tmp_path, monkeypatch):
    """It is made on a host without the device of the training."""
    engine = {"type": "fsdp2", "attention": "cudnn", "param_dtype": "bf16", "compile": {"modules": "auto"}}
    monkeypatch.setenv("CXX", "no-compiler")
    import_weights(language(tmp_path, engine=engine), published(tmp_path, "bert"))


@pytest.mark.parametrize("damage", ["cut", "wide", "absent"])
def test_an_import_that_cannot_be_leaves_nothing(damage, tmp_path):
    origin = published(tmp_path, "wide" if damage == "wide" else "bert")
    file = origin / "model.safetensors"
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 100)
    elif damage == "absent":
        tensors = load_file(file)
        del tensors["bert.embeddings.LayerNorm.weight"]
        save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        import_weights(language(tmp_path), origin)
    says = {
        "cut": "this is not a complete safetensors file: it is truncated, or longer than its header declares",
        "wide": "39 misshapen: lm.inner.bert.embeddings.word_embeddings.weight (48x32 in the file, 48x16 in",
        "absent": "1 missing: lm.inner.bert.embeddings.LayerNorm.weight",
    }
    assert says[damage] in str(caught.value)
    assert not list((tmp_path / "runs").rglob("step_*"))


def test_a_run_that_has_begun_is_left_alone(tmp_path):
    config, origin = language(tmp_path), published(tmp_path, "bert")
    saved, _ = import_weights(config, origin)
    before = (saved / "checksums.json").read_bytes()
    with pytest.raises(CheckpointError, match="this run has checkpoints already: step_00000000"):
        import_weights(config, origin)
    assert (saved / "checksums.json").read_bytes() == before


def test_formats_and_components_that_do_not_fit(tmp_path):
    import_weights(language(tmp_path, options={"second": True}, init_from={"path": "x", "strict": False}),
                   published(tmp_path, "bert"))  # fmt: skip
    run = tmp_path / "runs/tuned"
    cases = {
        ("transformer", None): "no weight_format is named 'transformer'",
        (
            "wan_transformer",
            "lm",
        ): "the format custom_dit/wan_transformer cannot store 'lm', of class Wrapped\n"
        "  accepted: core/safetensors, core/transformers",
        ("safetensors", None): "--to: 'lm' and 'head' would be written to files of the same name\n"
        "  hint: export them separately: --component lm",
        ("safetensors", "heat"): "this run trains no component 'heat'\n"
        "  accepted: lm, head\n  hint: did you mean 'head'?",
    }
    for (form, component), text in cases.items():
        with pytest.raises(MMError) as caught:
            export(run, tmp_path / "out", form, component=component)
        assert text in str(caught.value)
        assert not (tmp_path / "out").exists()
    out = export(run, tmp_path / "out", "safetensors", component="head")
    assert load_file(out / "model.safetensors").keys() == {"weight", "bias"}
