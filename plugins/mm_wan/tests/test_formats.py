"""Wan's two layouts on disk, in and out: every bit the same, whole pipelines, adapters."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import wan_runs as runs
import wan_variants as variants
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from mm_wan.formats import DIFFUSERS_KEYS, ORIGINAL_KEYS, WanDiffusers, WanOriginal
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.presets import PRESETS
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig

from mm_core.errors import CheckpointError, MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from support.runs import load_task, moved
from support.tensors import same, stored

FILE = "diffusion_pytorch_model.safetensors"


SIZES = {**runs.CHANNELS, "ffn_dim": 48}
IMAGE = 12 + 4
"""Channels of given frames: their latents, and which they are."""


def fields_of(variant: str) -> dict:
    """A tiny variant whose latents are those of the built-in autoencoder."""
    tiny = variants.tiny(variant)
    return {**SIZES, "in_channels": 12 + (IMAGE if tiny["in_channels"] > tiny["out_channels"] else 0)}


def published(variant: str) -> WanTransformer3DModel:
    return variants.published(variant, **fields_of(variant))


def architecture(variant: str) -> dict:
    """The architecture in a config, where no folder has one."""
    return variants.tiny(variant, **fields_of(variant))


def clip_at(folder: Path, variant: str) -> dict | None:
    """An image encoder as wide as the variant takes; its weights are never read."""
    if "image_dim" not in variants.tiny(variant):
        return None
    CLIPVisionConfig(hidden_size=10, num_attention_heads=2).save_pretrained(folder / "clip")
    return {"type": "wan/clip_vision", "from_pretrained": str(folder / "clip")}


def original_at(folder: Path, model: WanTransformer3DModel, **config) -> Path:
    """The same weights as Wan-AI publishes them."""
    folder.mkdir()
    names = {name: ORIGINAL_KEYS.renamed(name) for name in model.state_dict()}
    save_file({names[name]: t.contiguous() for name, t in model.state_dict().items()}, folder / FILE)
    fields = model.config
    document = {
        "_class_name": "WanModel",
        "_diffusers_version": "0.30.0",
        "dim": fields.num_attention_heads * fields.attention_head_dim,
        "eps": fields.eps,
        "ffn_dim": fields.ffn_dim,
        "freq_dim": fields.freq_dim,
        "in_dim": fields.in_channels,
        "model_type": "t2v",
        "num_heads": fields.num_attention_heads,
        "num_layers": fields.num_layers,
        "out_dim": fields.out_channels,
        "text_len": 512,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(document))
    return folder


# -- names -----------------------------------------------------------------------------------------

BLOCK = {
    "modulation",
    "norm3.weight",
    "norm3.bias",
    *(f"ffn.{n}.{p}" for n in (0, 2) for p in ("weight", "bias")),
    *(
        f"{kind}_attn.{layer}"
        for kind in ("self", "cross")
        for layer in (*(f"{x}.{p}" for x in "qkvo" for p in ("weight", "bias")),
                      "norm_q.weight", "norm_k.weight")
    ),
}  # fmt: skip
TOP = {
    "head.modulation",
    *(
        f"{layer}.{p}"
        for layer in ("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0",
                      "time_embedding.2", "time_projection.1", "head.head")
        for p in ("weight", "bias")
    ),
}  # fmt: skip
IMAGE_BLOCK = {f"cross_attn.{x}.{p}" for x in ("k_img", "v_img") for p in ("weight", "bias")}
IMAGE_BLOCK |= {"cross_attn.norm_k_img.weight"}
IMAGE_TOP = {f"img_emb.proj.{n}.{p}" for n in (0, 1, 3, 4) for p in ("weight", "bias")}


@pytest.mark.parametrize("preset", PRESETS)
def test_original_names_are_those_of_wan_ai_one_to_one(preset):
    """Those of WanModel's state dict (wan/modules/model.py): BLOCK, TOP and what images add."""
    with torch.device("meta"):
        model = WanTransformer(preset=preset)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    copies = ORIGINAL_KEYS.copies(shapes)
    assert len({copy.stored for copy in copies}) == len(copies) == len(shapes)
    image = model.architecture.image_dim is not None
    positions = {"img_emb.emb_pos"} if model.architecture.pos_embed_seq_len else set()
    in_block = BLOCK | (IMAGE_BLOCK if image else set())
    blocks = {f"blocks.{n}.{name}" for n in range(model.architecture.num_layers) for name in in_block}
    expected = blocks | TOP | (IMAGE_TOP if image else set()) | positions
    assert {copy.stored for copy in copies} == expected
    assert all(copy.stored_shape == shapes[copy.component] for copy in copies)


@pytest.mark.parametrize("variant", variants.DISTINCT)
def test_diffusers_own_conversion_gives_the_same_back(variant):
    """Diffusers reads Wan-AI's single files by this function, which is independent of our map."""
    weights = variants.published(variant).state_dict()
    original = {ORIGINAL_KEYS.renamed(name): tensor for name, tensor in weights.items()}
    positions = original.pop("img_emb.emb_pos", None)  # a file's name that the function leaves as it is
    back = convert_wan_transformer_to_diffusers(dict(original))
    if positions is not None:
        back["condition_embedder.image_embedder.pos_embed"] = positions
    same(back, dict(weights))


# -- in and out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", variants.DISTINCT)
@pytest.mark.parametrize("layout", ["wan/diffusers", "wan/original"])
def test_in_and_out_is_bit_equal_in_both_layouts(variant, layout, tmp_path):
    """And from one layout into the other, where Diffusers loads it without a remark."""
    model = published(variant)
    given, other = tmp_path / "given", tmp_path / "other"
    if layout == "wan/diffusers":
        model.save_pretrained(given)
        original_at(other, model)
    else:
        original_at(given, model)
        model.save_pretrained(other)
    config = runs.config_of(tmp_path, architecture(variant), image_encoder=clip_at(tmp_path, variant))
    _, notes = import_weights(config, given)
    assert f"({layout})" in notes[0]
    out = export(tmp_path / "runs/tuned", tmp_path / "out", layout)
    same(stored(out), stored(given))
    across = ({"wan/diffusers", "wan/original"} - {layout}).pop()
    turned = export(tmp_path / "runs/tuned", tmp_path / "turned", across, max_shard="50kB")
    assert len(list(turned.glob("*.safetensors"))) > 1
    same(stored(turned), stored(other))
    loadable = out if layout == "wan/diffusers" else turned
    loaded, info = WanTransformer3DModel.from_pretrained(loadable, output_loading_info=True)
    assert not any(info.values())
    same(dict(loaded.state_dict()), dict(model.state_dict()))
    inputs = variants.inputs(variant) | {
        "text": torch.randn(2, 512, 32),
        "latents": torch.randn(2, 12, 2, 6, 4),
    }
    if "image_latents" in inputs:
        inputs["image_latents"] = torch.randn(2, IMAGE, 2, 6, 4)
    with torch.no_grad():
        assert torch.equal(variants.theirs(loaded.eval(), inputs), variants.theirs(model, inputs))
    again = runs.config_of(
        tmp_path, {"from_pretrained": str(turned)}, "again", image_encoder=clip_at(tmp_path, variant)
    )
    import_weights(again, turned)
    same(stored(export(tmp_path / "runs/again", tmp_path / "back", layout)), stored(given))


@pytest.mark.parametrize("variant", variants.DISTINCT)
def test_an_original_folder_declares_its_architecture(variant, tmp_path):
    model = published(variant)
    folder = original_at(tmp_path / "original", model)
    with torch.device("meta"):
        ours = WanTransformer(from_pretrained=str(folder))
    expected = {**architecture(variant), "rope_max_seq_len": 1024}
    assert {name: ours.architecture.fields[name] for name in expected} == expected
    assert (ours.weights_from.path, ours.weights_from.format) == (str(folder), "wan/original")
    assert WanOriginal().recognises(folder) and not WanDiffusers().recognises(folder)
    config = json.loads(WanOriginal().layout("predictor", ours).texts["config.json"])
    written = json.loads((folder / "config.json").read_text())
    kinds = {"i2v": ("wan2.1-i2v-14b-480p", "wan2.2-i2v-a14b"), "flf2v": ("wan2.1-flf2v-14b-720p",)}
    assert config["model_type"] == next((kind for kind, of in kinds.items() if variant in of), "t2v")
    for document in (config, written):
        del document["_diffusers_version"], document["model_type"]
    assert config == written


def test_both_experts_of_an_original_folder_are_found(tmp_path):
    model = published("wan2.2-t2v-a14b")
    for name in ("high_noise_model", "low_noise_model"):
        original_at(tmp_path / name, model)
    assert WanOriginal().recognises(tmp_path)
    assert WanOriginal().folders(tmp_path) == ["high_noise_model", "low_noise_model"]


def test_a_norm_that_nothing_uses_is_skipped():
    """The first image-to-video checkpoints hold it; Diffusers' class passes it over too."""
    assert WanTransformer3DModel._keys_to_ignore_on_load_unexpected == ["norm_added_q"]
    assert DIFFUSERS_KEYS.ignores("blocks.7.attn2.norm_added_q.weight")
    assert not DIFFUSERS_KEYS.ignores("blocks.7.attn2.norm_added_k.weight")


# -- pipelines -------------------------------------------------------------------------------------


def test_a_pipeline_comes_out_whole(tmp_path):
    """A run that began with it: its transformer changed, everything else as it was."""
    origin = runs.pipeline_at(tmp_path / "wan", published("wan2.1-t2v-1.3b"))
    config = runs.config_of(tmp_path, {"from_pretrained": str(origin)})
    saved, _ = import_weights(config, origin)
    same_out = export(f"{tmp_path}/runs/tuned@0", tmp_path / "same", "wan/diffusers")
    names = {"model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"}
    assert {path.name for path in same_out.iterdir()} == names | {"README.md"}
    for name in names - {"transformer"}:
        files = [origin / name] if (origin / name).is_file() else sorted((origin / name).iterdir())
        for path in files:
            assert (same_out / path.relative_to(origin)).read_bytes() == path.read_bytes()
    before = runs.clip(WanPipeline.from_pretrained(origin))
    assert torch.equal(runs.clip(WanPipeline.from_pretrained(same_out)), before)
    task = moved(config, saved, "to_q")
    out = export(f"{tmp_path}/runs/tuned@5", tmp_path / "out", "wan/diffusers")
    pipeline = WanPipeline.from_pretrained(out)
    same(dict(pipeline.transformer.state_dict()), dict(task.predictor.state_dict()))
    assert (runs.clip(pipeline) - before).abs().max() > 1e-3
    assert 'pipeline = WanPipeline.from_pretrained("out")' in (out / "README.md").read_text()


def test_one_of_two_transformers_comes_out_in_its_place(tmp_path):
    origin = runs.pipeline_at(
        tmp_path / "wan", published("wan2.2-t2v-a14b"), published("wan2.2-t2v-a14b").requires_grad_(False)
    )
    weights = {name: t + 1 for name, t in stored(origin / "transformer_2").items()}
    save_file(weights, origin / "transformer_2" / FILE, {"format": "pt"})
    config = runs.config_of(tmp_path, {"from_pretrained": str(origin / "transformer_2")})
    import_weights(config, origin / "transformer_2")
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "wan/diffusers")
    same(stored(out / "transformer_2"), weights)
    same(stored(out / "transformer"), stored(origin / "transformer"))
    assert WanPipeline.from_pretrained(out).config.boundary_ratio == 0.875


def test_without_an_origin_it_is_a_lone_transformer(tmp_path):
    import_weights(runs.config_of(tmp_path, architecture("wan2.1-t2v-1.3b")), lone(tmp_path))
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "wan/diffusers")
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", FILE}
    config = json.loads((out / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel" and config["num_layers"] == 2
    core = export(tmp_path / "runs/tuned", tmp_path / "core", "core/diffusers")
    assert json.loads((core / "config.json").read_text()) == config


def lone(tmp_path: Path) -> Path:
    published("wan2.1-t2v-1.3b").save_pretrained(tmp_path / "lone")
    return tmp_path / "lone"


# -- adapters --------------------------------------------------------------------------------------

ADAPTER = {"targets": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj"], "rank": 4, "alpha": 6.0}


def test_an_adapter_is_loaded_by_the_pipeline(tmp_path):
    origin = runs.pipeline_at(tmp_path / "wan", published("wan2.1-t2v-1.3b"))
    train = {"epochs": 1, "adapters": [ADAPTER]}
    config = runs.config_of(tmp_path, {"from_pretrained": str(origin)}, train=train)
    saved, _ = import_weights(config, origin)
    task = moved(config, saved, "lora_")
    out = export(f"{tmp_path}/runs/tuned@5", tmp_path / "out", "wan/diffusers")
    assert {path.name for path in out.iterdir()} == {"README.md", "pytorch_lora_weights.safetensors"}
    merged = export(f"{tmp_path}/runs/tuned@5", tmp_path / "merged", "wan/diffusers", merge_adapters=True)
    pipeline = WanPipeline.from_pretrained(origin)
    plain = runs.clip(pipeline)
    pipeline.load_lora_weights(out)
    given = variants.inputs("wan2.1-t2v-1.3b") | {
        "text": torch.randn(2, 512, 32), "latents": torch.randn(2, 12, 2, 6, 4)
    }  # fmt: skip
    with torch.no_grad():
        ours, found = task.predictor.eval()(**given), variants.theirs(pipeline.transformer.eval(), given)
    assert (ours - found).abs().max() < 1e-4
    adapted = runs.clip(pipeline)
    assert (adapted - plain).abs().max() > 1e-2
    assert (runs.clip(WanPipeline.from_pretrained(merged)) - adapted).abs().max() < 1e-4


def test_an_adapter_that_diffusers_has_saved_begins_ours(tmp_path):
    model = published("wan2.1-t2v-1.3b")
    origin = runs.pipeline_at(tmp_path / "wan", model)
    model.add_adapter(LoraConfig(r=3, lora_alpha=9, target_modules=["to_q", "to_v"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    WanPipeline.save_lora_weights(
        tmp_path / "lora",
        get_peft_model_state_dict(model),
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    adapters = [{"from": str(tmp_path / "lora")}]
    config = runs.config_of(
        tmp_path, {"from_pretrained": str(origin)}, train={"epochs": 1, "adapters": adapters}
    )
    saved, notes = import_weights(config, origin)
    assert any("adapter 'default' loaded" in note for note in notes)
    task = load_task(config, saved, "model")
    given = variants.inputs("wan2.1-t2v-1.3b") | {
        "text": torch.randn(2, 512, 32), "latents": torch.randn(2, 12, 2, 6, 4)
    }  # fmt: skip
    with torch.no_grad():
        ours, expected = task.predictor.eval()(**given), variants.theirs(model.eval(), given)
    assert (ours - expected).abs().max() < 1e-4
    back = export(tmp_path / "runs/tuned", tmp_path / "out", "wan/diffusers")
    same(stored(back), stored(tmp_path / "lora"))


# -- what is wrong ---------------------------------------------------------------------------------


def test_a_truncated_file_is_a_readable_error_and_leaves_nothing(tmp_path):
    folder = lone(tmp_path)
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 100)
    config = runs.config_of(tmp_path, {"from_pretrained": str(folder)})
    said = re.escape(f"{FILE}: this is not a complete safetensors file: it is truncated, or longer than")
    with pytest.raises(CheckpointError, match=said):
        import_weights(config, folder)
    assert not list((tmp_path / "runs").rglob("step_*"))
    original = original_at(tmp_path / "original", published("wan2.1-t2v-1.3b"))
    os.truncate(original / FILE, 1000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: this is not a complete safetensors file"):
        WanTransformer(from_pretrained=str(original))


def test_weights_of_another_variant_are_a_readable_error(tmp_path):
    published("wan2.1-i2v-14b-480p").save_pretrained(tmp_path / "i2v")
    config = runs.config_of(tmp_path, architecture("wan2.1-t2v-1.3b"))
    with pytest.raises(
        CheckpointError, match=r"misshapen: predictor.patch_embedding.weight \(24x28x1x2x2 in "
    ):
        import_weights(config, tmp_path / "i2v")


def test_an_original_folder_without_its_tensors_is_a_readable_error(tmp_path):
    folder = original_at(tmp_path / "original", published("wan2.1-t2v-1.3b"))
    tensors = load_file(folder / FILE)
    del tensors["text_embedding.0.weight"]
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=r"the weights lack text_embedding.0.weight"):
        WanTransformer(from_pretrained=str(folder))
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"there are no weights here"):
        WanTransformer(from_pretrained=str(folder))


def test_a_part_of_the_pipeline_that_is_gone_is_a_readable_error(tmp_path):
    origin = runs.pipeline_at(tmp_path / "wan", published("wan2.1-t2v-1.3b"))
    import_weights(runs.config_of(tmp_path, {"from_pretrained": str(origin)}), origin)
    (origin / "vae").rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=r"wan/vae: the pipeline's folder lacks a file or folder that the export copies"
    ):
        export(tmp_path / "runs/tuned", tmp_path / "out", "wan/diffusers")
    assert not (tmp_path / "out").exists()


def test_what_the_formats_cannot_hold_is_a_readable_error(tmp_path):
    train = {"epochs": 1, "adapters": [ADAPTER]}
    import_weights(runs.config_of(tmp_path, architecture("wan2.1-t2v-1.3b"), train=train), lone(tmp_path))
    with pytest.raises(
        MMError, match=r"wan/original cannot store an adapter of 'predictor', of class WanTransformer"
    ) as fault:
        export(tmp_path / "runs/tuned", tmp_path / "out", "wan/original")
    assert fault.value.hint == "export merged weights (--merge-lora)"
    export(tmp_path / "runs/tuned", tmp_path / "out", "wan/original", merge_adapters=True)
