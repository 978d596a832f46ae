"""What PEFT's settings and the tensors of an adapter file mean: read as PEFT does, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mm_core.errors import CheckpointError
from mm_core.weights.adapters.files import open_adapter
from mm_core.weights.adapters.kinds import change_of
from mm_core.weights.adapters.settings import _KNOWN

NAME = "diffusion_model.blocks.0.self_attn.q"


def plain() -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"q": nn.Linear(16, 24), "k": nn.Linear(16, 24)})


def saved(folder: Path, config, **settings) -> Path:
    """An adapter as PEFT saves it, with random matrices, and settings changed afterwards."""
    model = peft.get_peft_model(plain(), config)
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            parameter.normal_()
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def lora(folder: Path, **settings) -> Path:
    return saved(folder, peft.LoraConfig(r=2, target_modules=["q", "k"]), **settings)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_adapter(path)
    return str(caught.value)


# -- scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [9999999999.0, 16.0, float("inf")])
def test_a_lokr_of_two_whole_matrices_is_scaled_by_one_whatever_its_alpha(alpha, tmp_path):
    """ai-toolkit writes alpha 9999999999, in fp16 inf; LyCORIS its dim (lycoris/modules/lokr.py)."""
    tensors = {f"{NAME}.lokr_w1": torch.ones(4, 4), f"{NAME}.lokr_w2": torch.ones(4, 6)}
    save_file(tensors | {f"{NAME}.alpha": torch.tensor(alpha)}, tmp_path / "k.safetensors")
    assert open_adapter(tmp_path / "k.safetensors").scales["blocks.0.self_attn.q"].factor == 1
    save_file(tensors, tmp_path / "k.safetensors")
    assert open_adapter(tmp_path / "k.safetensors").scales["blocks.0.self_attn.q"].factor == 1


@pytest.mark.parametrize(
    "settings",
    [{"r": 16, "alpha": 4}, {"r": 2, "alpha": 4, "rank_pattern": {"k": 32}, "alpha_pattern": {"k": 8}}],
)
@pytest.mark.parametrize("kind", [peft.LoKrConfig, peft.LoHaConfig])
def test_a_lokr_and_a_loha_of_peft_are_scaled_as_peft_does(kind, settings, tmp_path):
    folder = saved(tmp_path, kind(target_modules=["q", "k"], **settings))
    theirs = peft.PeftModel.from_pretrained(plain(), folder)
    file = open_adapter(folder)
    for module, scale in file.scales.items():
        layer = theirs.base_model.model[module]
        parts = {p: load_file(file.stored.where)[key] for (m, p), key in file.keys.items() if m == module}
        torch.testing.assert_close(scale.factor * change_of(parts), layer.get_delta_weight("default"))


def test_an_alpha_that_is_missing_in_the_settings_is_peft_s_own(tmp_path):
    folder = lora(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "lora_alpha"}))
    theirs = peft.PeftModel.from_pretrained(plain(), folder).base_model.model["q"].scaling["default"]
    assert {scale.factor for scale in open_adapter(folder).scales.values()} == {theirs} == {4.0}


def test_a_transposed_weight_is_nothing_to_a_linear_layer(tmp_path):
    with pytest.warns(UserWarning, match="fan_in_fan_out is set to True but the target module"):
        folder = saved(tmp_path, peft.LoraConfig(r=2, target_modules=["q"], fan_in_fan_out=True))
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    assert [scale.rank for scale in open_adapter(folder).scales.values()] == [2]


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "module."])
@pytest.mark.parametrize("pattern", ["^{}q", "{}q", "^q"])
def test_a_pattern_of_a_wrapped_model_means_the_module_in_it(wrapper, pattern, tmp_path):
    folder = lora(tmp_path, alpha_pattern={pattern.format(wrapper): 2, pattern.format(wrapper)[:-1] + "z": 9})
    path = folder / "adapter_model.safetensors"
    start = "base_model.model."
    tensors = {start + wrapper + name.removeprefix(start): t for name, t in load_file(path).items()}
    save_file(tensors, path)
    found = {name.rpartition(".")[2]: scale.alpha for name, scale in open_adapter(folder).scales.items()}
    assert found == {"q": 2.0 if pattern != "^q" or wrapper != "module." else 8.0, "k": 8.0}


@pytest.mark.parametrize(("start", "alpha"), [("transformer.", 4.0), ("text_encoder.", 6.0)])
def test_of_the_settings_of_two_components_those_of_the_file_s_own_apply(start, alpha, tmp_path):
    header = json.dumps({"transformer.lora_alpha": 4, "text_encoder.lora_alpha": 6})
    tensors = {f"{start}q.lora_A.weight": torch.ones(2, 16), f"{start}q.lora_B.weight": torch.ones(24, 2)}
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, path, {"lora_adapter_metadata": header})
    if start == "transformer.":
        assert open_adapter(path).scales["q"].alpha == alpha
    else:
        assert "not a JSON object with the settings of one component" in refusal(path)


# -- other computations --------------------------------------------------------------------------


VARIANTS = {
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "use_bdlora": {"target_modules_bd_a": ["q"], "nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"samples": 4},
    "layer_replication": [[0, 1], [0, 1]],
    "target_parameters": ["experts.up"],
    "trainable_token_indices": [3],
    "megatron_config": {"tensor_model_parallel_size": 2},
    "modules_to_save": ["k"],
    "bias": "lora_only",
    "some_variant_of_later": True,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_setting_with_which_peft_computes_something_else_is_refused_by_name(name, tmp_path):
    text = refusal(lora(tmp_path, **{name: VARIANTS[name]}))
    assert f"this adapter has settings that change what it computes: {name}: " in text


def test_every_variant_of_the_installed_peft_is_read_or_refused():
    fields = dataclasses.fields(peft.LoraConfig)
    variants = {field.name for field in fields if field.metadata.get("is_lora_variant")}
    assert variants - VARIANTS.keys() <= {"use_dora", "velora_config"}, "the second changes gradients only"
    for config in (peft.LoraConfig, peft.LoKrConfig, peft.LoHaConfig):
        names = {field.name for field in dataclasses.fields(config)}
        assert names - VARIANTS.keys() <= _KNOWN


@pytest.mark.parametrize("begun", ["pissa", "olora", "corda", "loftq", "lora_ga"])
def test_an_initialisation_that_changed_the_base_is_refused_by_name(begun, tmp_path):
    assert f"this adapter was initialised with {begun!r}, which also changed" in refusal(
        lora(tmp_path, init_lora_weights=begun)
    )


@pytest.mark.parametrize("missing", ["one", "all", "setting"])
def test_a_dora_is_one_in_all_of_its_modules_and_in_its_settings(missing, tmp_path):
    dora = peft.LoraConfig(r=2, target_modules=["q", "k"], use_dora=True)
    folder = saved(tmp_path, dora, **({"use_dora": False} if missing == "setting" else {}))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    lengths = [name for name in tensors if "magnitude" in name]
    gone = {"one": lengths[:1], "all": lengths, "setting": []}[missing]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, path)
    odd = {"one": "a DoRA, but 1 module lack", "all": "a DoRA, but 2 modules lack"}
    assert odd.get(missing, "no DoRA, but 2 modules have lora_magnitude_vector: ") in refusal(folder)


# -- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"r": 2, "lora_al', "", "{}", "[]", '"LORA"', "null", "\x00", "[" * 100_000]
)
def test_settings_that_cannot_be_read_are_refused_and_not_left_out(text, tmp_path):
    folder = lora(tmp_path)
    (folder / "adapter_config.json").write_text(text)
    for path in (folder, folder / "adapter_model.safetensors"):
        said = refusal(path)
        assert said.startswith(f"{folder}/adapter_config.json: this is not a JSON object with an adapter's")


def test_settings_that_are_gone_are_missed(tmp_path):
    folder = lora(tmp_path)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json: there is no such file, which contains the adapter's alpha" in refusal(folder)
    (folder / "adapter_model.safetensors").rename(folder / "style.safetensors")
    assert {scale.factor for scale in open_adapter(folder / "style.safetensors").scales.values()} == {1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha_pattern": ["q"]}, "alpha_pattern is ['q']\n  accepted: a mapping of modules to numbers"),
        ({"alpha_pattern": {"q": "much"}}, "lora_alpha is 'much'\n  accepted: a number above 0"),
    ],
)
def test_patterns_that_are_none_are_refused(settings, said, tmp_path):
    assert said in refusal(lora(tmp_path, **settings))


@pytest.mark.parametrize(
    "kind", [torch.complex64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_tensors_that_are_no_real_numbers_are_refused_by_name(kind, tmp_path):
    path, good = tmp_path / "a.safetensors", {f"{NAME}.lora_A.weight": torch.ones(2, 8)}
    good[f"{NAME}.lora_B.weight"] = torch.ones(8, 2)
    for name in (*good, f"{NAME}.diff_b"):
        save_file(good | {name: torch.ones(good.get(name, torch.ones(8)).shape).to(kind)}, path)
        assert f"{name} has the dtype {str(kind).removeprefix('torch.')}\n" in refusal(path)
    save_file(good | {f"{NAME}.alpha": torch.tensor(4).to(kind)}, path)
    if kind in (torch.complex64, torch.bool):
        assert f"{NAME}.alpha has the dtype" in refusal(path)
    else:  # kohya's scripts write a whole alpha as an integer
        assert open_adapter(path).scales["blocks.0.self_attn.q"].factor == 2


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64])
def test_floating_point_numbers_of_any_size_are_read(kind, tmp_path):
    tensors = {f"{NAME}.lora_A.weight": torch.ones(2, 8), f"{NAME}.lora_B.weight": torch.ones(8, 2)}
    tensors[f"{NAME}.alpha"] = torch.tensor(4.0)
    save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    file = open_adapter(tmp_path / "a.safetensors")
    assert file.scales["blocks.0.self_attn.q"].factor == 2
    read = file.stored.read(f"{NAME}.lora_A.weight", (slice(0, 2), slice(0, 8)))
    assert torch.equal(read.float(), torch.ones(2, 8))
