"""LoRAs of both experts of Wan 2.2 as other programs name their files and keys, and wrapped models' names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.predictor.two_expert import TwoExpert
from safetensors.torch import save_file
from torch import nn

from mm_core.errors import CheckpointError
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import linear_layers
from mm_core.weights.adapters.locate import Located, locate
from mm_core.weights.fitting import formats_of

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 4}
TINY |= {"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 40, "rope_max_seq_len": 32}
MODULES = ("blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0", "condition_embedder.time_proj")


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self, train: str = "both") -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = WanTransformer(**TINY) if train == "one" else TwoExpert(train=train, **TINY)

    def find(self, path: Path) -> Located:
        linear = {"predictor": linear_layers(self.predictor)}
        return locate(self, str(path), linear, formats_of(get_registry(())))


def theirs(module: str) -> str:
    return ORIGINAL_KEYS.renamed(f"{module}.weight").removesuffix(".weight")


def tensors(
    start: str, value: float = 1.0, name=theirs, alpha: float | None = None
) -> dict[str, torch.Tensor]:
    found = {}
    for module in MODULES:
        rows, columns = Task("one").predictor.get_submodule(module).weight.shape
        found[f"{start}{name(module)}.lora_A.weight"] = torch.full((2, columns), value)
        found[f"{start}{name(module)}.lora_B.weight"] = torch.full((rows, 2), value)
        if alpha is not None:
            found[f"{start}{name(module)}.alpha"] = torch.tensor(alpha)
    return found


def values(found: Located) -> dict[str, float]:
    """Module -> the value that its matrix has in the file that it was found in."""
    held = {}
    for module, (file, stored) in found.modules.items():
        key = file.keys[stored, "lora_A"]
        held[module] = float(file.stored.read(key, (slice(0, 1), slice(0, 1))))
    return held


BOTH = {f"{part}.{m}": value for part, value in (("high", 1.0), ("low", 2.0)) for m in MODULES}


# -- files ---------------------------------------------------------------------------------------

PAIRS = [
    ("wan2.2_t2v_A14b_high_noise_lora_rank64_lightx2v_4step.safetensors",
     "wan2.2_t2v_A14b_low_noise_lora_rank64_lightx2v_4step.safetensors"),
    ("high_noise_model.safetensors", "low_noise_model.safetensors"),
    ("Wan22-T2V-HIGH-lowpoly.safetensors", "Wan22-T2V-LOW-lowpoly.safetensors"),
    ("StyleHighNoise.safetensors", "StyleLowNoise.safetensors"),
    ("style.highnoise.safetensors", "style.lownoise.safetensors"),
    ("high_noise_lora/adapter_model.safetensors", "low_noise_lora/adapter_model.safetensors"),
]  # fmt: skip


def pair(folder: Path, names: tuple[str, str]) -> list[Path]:
    files = []
    for value, name in zip((1.0, 2.0), names, strict=True):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        peft = file.name == "adapter_model.safetensors"
        save_file(tensors("base_model.model." if peft else "diffusion_model.", value), file)
        if peft:
            (file.parent / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        files.append(file.parent if peft else file)
    return files


@pytest.mark.parametrize("names", PAIRS, ids=lambda names: names[0])
def test_a_pair_is_found_by_the_names_of_other_programs(names, tmp_path):
    files = pair(tmp_path / "pair", names)
    assert values(Task().find(tmp_path / "pair")) == BOTH
    for part, file in zip(("high", "low"), files, strict=True):
        own = {module: value for module, value in BOTH.items() if module.startswith(part)}
        if "noise" in str(file.relative_to(tmp_path)).lower():
            assert values(Task().find(file)) == own
        assert values(Task(part).find(tmp_path / "pair")) == own


@pytest.mark.parametrize("name", ["high_detail", "style", "high_noise_to_low_noise"])
def test_a_file_alone_whose_name_may_mean_something_else_is_not_given_to_an_expert(name, tmp_path):
    (tmp_path / "folder").mkdir()
    save_file(tensors("diffusion_model."), tmp_path / "folder" / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="do not show which is for high and which for low"):
        Task().find(tmp_path / "folder")
    with pytest.raises(CheckpointError) as caught:
        Task().find(tmp_path / "folder" / f"{name}.safetensors")
    assert str(caught.value).endswith(
        "this adapter fits several components equally well: predictor.high, predictor.low\n"
        "  accepted: a file that fits only one of them, a file whose name contains high_noise or low_noise,"
        " or a folder of files named as by mm export"
    )


def test_names_that_show_no_expert_are_a_sentence_on_how_to_name_them(tmp_path):
    pair(tmp_path, ("style-h.safetensors", "style-l.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        Task().find(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: the names of the files here do not show which is for high and which for low:"
        " style-h.safetensors, style-l.safetensors\n"
        "  accepted: one file for each, with the word in its name: style_high.safetensors,"
        " style_low.safetensors\n"
        "  hint: rename the files, or move those of one adapter into a folder of their own"
    )


def test_a_file_beside_that_of_one_expert_is_not_left_out(tmp_path):
    pair(tmp_path, ("style_high_noise.safetensors", "style_lo.safetensors"))
    with pytest.raises(CheckpointError, match=r"do not show which is for low: style_lo\.safetensors"):
        Task().find(tmp_path)
    assert len(Task("high").find(tmp_path).modules) == 3


def test_two_pairs_in_one_folder_are_refused(tmp_path):
    for version in ("v1", "v2"):
        pair(tmp_path, (f"{version}_high_noise.safetensors", f"{version}_low_noise.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        Task().find(tmp_path)
    assert "several files here are for high by their names: v1_high_noise.safetensors, v2_high" in str(
        caught.value
    )


def test_a_file_of_a_pair_that_fits_no_expert_is_not_left_out(tmp_path):
    _, low = pair(tmp_path, PAIRS[1])
    save_file({"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)}, low)
    with pytest.raises(CheckpointError, match=r"1 of the 4 modules in this adapter match no linear layer"):
        Task().find(tmp_path)


def test_an_addition_that_fits_one_expert_only_is_not_left_out(tmp_path):
    for file, size in zip(pair(tmp_path, PAIRS[1]), (24, 7), strict=True):
        held = tensors("diffusion_model.") | {"diffusion_model.blocks.0.self_attn.q.diff_b": torch.ones(size)}
        save_file(held, file)
    with pytest.raises(CheckpointError, match="also changes 1 full tensor of another shape or form"):
        Task().find(tmp_path)


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("high", "low", "name"),
    [
        ("transformer.", "transformer_2.", str),
        ("high_noise_model.", "low_noise_model.", theirs),
        ("diffusion_model.high_noise.", "diffusion_model.low_noise.", theirs),
        ("pipe.dit.", "pipe.dit2.", theirs),
        ("base_model.model.high.", "base_model.model.low.", str),
        ("module.transformer.", "module.transformer_2.", str),
    ],
)
def test_both_experts_in_one_file_are_read_apart(high, low, name, tmp_path):
    path = tmp_path / "both.safetensors"
    alphas = {f"{part}.lora_alpha": alpha for part, alpha in (("transformer", 8), ("transformer_2", 4))}
    save_file(
        tensors(high, 1.0, name) | tensors(low, 2.0, name),
        path,
        {"lora_adapter_metadata": json.dumps(alphas)} if high == "transformer." else None,
    )
    found = Task().find(path)
    assert values(found) == BOTH
    for part in ("high", "low"):
        assert values(Task(part).find(path)) == {m: v for m, v in BOTH.items() if m.startswith(part)}
    if high == "transformer.":
        scales = {module: file.scales[stored].factor for module, (file, stored) in found.modules.items()}
        assert scales == {module: 4.0 if module.startswith("high") else 2.0 for module in BOTH}


def test_a_bias_of_one_experts_factor_is_not_left_out(tmp_path):
    bias = {f"transformer_2.{MODULES[0]}.lora_B.bias": torch.ones(24)}
    both = tensors("transformer.", name=str) | tensors("transformer_2.", name=str)
    save_file(both | bias, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"it contains transformer_2\.{MODULES[0]}\.lora_B\.bias"):
        Task().find(tmp_path / "a.safetensors")


def test_keys_beside_those_of_both_experts_are_not_left_out(tmp_path):
    more = {
        "text_encoder.a.lora_A.weight": torch.ones(2, 4),
        "text_encoder.a.lora_B.weight": torch.ones(4, 2),
    }
    save_file(
        tensors("transformer.", name=str) | tensors("transformer_2.", name=str) | more,
        tmp_path / "a.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"modules in this adapter match no linear layer"):
        Task().find(tmp_path / "a.safetensors")


WRAPPED = [
    "_orig_mod.{}",
    "module.{}",
    "module.module.{}",
    "module._orig_mod.{}",
    "diffusion_model._orig_mod.{}",
    "_fsdp_wrapped_module.{}",
    "_fsdp_wrapped_module._checkpoint_wrapped_module.{}",
    "base_model.model.module.{}",
    "dit.{}",
    "model.dit._orig_mod.{}",
]


def within_blocks(wrapper: str):
    return lambda module: theirs(module).replace("blocks.0.", f"blocks.0.{wrapper}.")


@pytest.mark.parametrize("form", WRAPPED)
@pytest.mark.parametrize("name", [theirs, str], ids=["publisher", "diffusers"])
def test_what_wraps_a_model_is_no_part_of_its_names(form, name, tmp_path):
    save_file(tensors("", name=lambda m: form.format(name(m)), alpha=4.0), tmp_path / "a.safetensors")
    found = Task("one").find(tmp_path / "a.safetensors")
    assert values(found) == dict.fromkeys(MODULES, 1.0)
    assert {file.scales[stored].factor for file, stored in found.modules.values()} == {2.0}


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
@pytest.mark.parametrize("start", ["diffusion_model.", "lora_unet_", "lycoris_"])
def test_what_wraps_a_block_is_no_part_of_its_names(wrapper, start, tmp_path):
    inside = within_blocks(wrapper)
    flat = start.endswith("_")
    save_file(
        tensors(start, name=lambda m: inside(m).replace(".", "_") if flat else inside(m)),
        tmp_path / "a.safetensors",
    )
    assert values(Task("one").find(tmp_path / "a.safetensors")) == dict.fromkeys(MODULES, 1.0)


@pytest.mark.parametrize("start", ["lycoris_", "lora_unet__orig_mod_", "lycoris_module_"])
def test_the_flat_names_of_lycoris_are_read(start, tmp_path):
    file = tmp_path / "a.safetensors"
    save_file(tensors(start, name=lambda m: theirs(m).replace(".", "_"), alpha=2.0), file)
    assert values(Task("one").find(file)) == dict.fromkeys(MODULES, 1.0)


def test_names_that_nobody_knows_are_a_true_sentence(tmp_path):
    save_file(tensors("", name=lambda m: f"part.{m.replace('attn', 'mixer')}"), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Task("one").find(tmp_path / "a.safetensors")
    assert "2 of the 3 modules in this adapter match no linear layer of predictor" in str(caught.value)
    save_file(tensors("", name=lambda m: f"x{m}.y"), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Task("one").find(tmp_path / "a.safetensors")
    assert str(caught.value).endswith(
        "hint: the adapter is for a different model, or gives modules names unlike those here"
        " (condition_embedder.time_embedder.linear_1)"
    )
