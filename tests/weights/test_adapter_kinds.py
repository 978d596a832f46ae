"""LoKr and LoHa: PEFT's layers, merged as PEFT merges them, and files that ComfyUI and PEFT load."""

from __future__ import annotations

import peft
import pytest
import torch
from diffusers import WanTransformer3DModel
from lycoris.modules import get_module, make_module
from safetensors.torch import load_file
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.errors import ContractError, PlanError
from mm_core.interchange.export import export
from mm_core.interchange.lora import export_lora
from mm_core.modules.adapter_layers import adapted_layers, adapter_of
from mm_core.plan import build_task
from mm_core.weights.adapters.files import open_adapter
from mm_core.weights.adapters.inject import AdapterWeights
from mm_core.weights.fitting import formats_of
from support import runs
from support.tensors import close

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "out_channels": 12}
WAN |= {key: runs.DIT[key] for key in ("num_layers", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")}
ADAPTERS = {
    "lokr": {"kind": "lokr", "rank": 2, "alpha": 1.0},
    "lokr, whole": {"kind": "lokr", "rank": 16},
    "lokr, factor 2": {"kind": "lokr", "rank": 2, "alpha": 1.0, "decompose_factor": 2},
    "loha": {"kind": "loha", "rank": 3, "alpha": 6.0},
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ADAPTERS)
def run(request, tmp_path_factory):
    """The folder, the published base and the task of a run that trained such an adapter."""
    folder = tmp_path_factory.mktemp("kinds")
    torch.manual_seed(4)
    origin = folder / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    adapter = {"targets": ["to_q", "ffn.net.2"], **ADAPTERS[request.param]}
    config = runs.config_of(folder, runs.VIDEO, train={"epochs": 1, "adapters": [adapter]})
    return folder, origin, runs.trained(config, origin)


def test_merged_weights_are_those_that_peft_merges(run, tmp_path):
    folder, origin, task = run
    merged = export(folder / "runs/tuned", tmp_path / "merged", "wan_transformer", merge_adapters=True)
    before = WanTransformer3DModel.from_pretrained(origin).state_dict()
    after = WanTransformer3DModel.from_pretrained(merged).state_dict()
    layers = adapted_layers(task.predictor)
    assert len(layers) == 6
    for path, layer in layers.items():
        change = layer.get_delta_weight("default").detach()
        assert change.abs().max() > 0.01
        close(after[f"{path}.weight"], before[f"{path}.weight"] + change)


@pytest.mark.parametrize("label", ["lora/comfyui", "lora/kohya", "lora/peft"])
def test_the_files_come_back_bit_by_bit(run, label, tmp_path):
    folder, _, task = run
    out = tmp_path / ("style" if label == "lora/peft" else "style.safetensors")
    files = export_lora(folder / "runs/tuned", out, label)
    names = load_file(next(path for path in files if path.suffix == ".safetensors"))
    assert any(".lokr_w1" in name or ".hada_w1_a" in name for name in names)
    train = {"epochs": 1, "adapters": [{"from": str(out)}]}
    config = runs.config_of(tmp_path, runs.VIDEO, "again", train=train)
    again = build_task(config)
    weights = AdapterWeights(again, config.train.adapters, formats_of(config.registry))
    state = {n: torch.empty(p.shape) for n, p in again.named_parameters() if n in weights.names}
    weights.fill(state)
    trained = {f"predictor.{n}": p for n, p in task.predictor.named_parameters() if adapter_of(n)}
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], trained[name]) for name in state)
    scales = {layer.scaling["default"] for layer in adapted_layers(again.predictor).values()}
    assert scales == {layer.scaling["default"] for layer in adapted_layers(task.predictor).values()}


def test_peft_loads_the_folder(run, tmp_path):
    folder, origin, task = run
    export_lora(folder / "runs/tuned", tmp_path / "style", "lora/peft")
    plain = WanTransformer3DModel.from_pretrained(origin)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "style")
    inputs = torch.randn(1, 12, 4, 8, 8), torch.tensor([500.0]), torch.randn(1, 5, 32)
    with torch.no_grad():
        close(model.eval()(*inputs).sample, task.predictor(*inputs, torch.ones(1, 5, dtype=torch.bool)))


def test_lycoris_computes_the_same_with_the_file_of_kohya(run, tmp_path):
    folder, _, task = run
    (path,) = export_lora(folder / "runs/tuned", tmp_path / "style.safetensors", "lora/kohya")
    tensors = load_file(path)
    for module, layer in adapted_layers(task.predictor).items():
        name = f"lora_unet_{module.replace('.', '_')}"
        plain = nn.Linear(layer.in_features, layer.out_features)
        with torch.no_grad():
            theirs = make_module(*get_module(tensors, name), name, plain)
            before = plain(x := torch.randn(3, layer.in_features))
            theirs.apply_to()
            close(plain(x) - before, x @ layer.get_delta_weight("default").T)


def test_diffusers_has_no_such_files(run, tmp_path):
    with pytest.raises(ContractError, match="is a LoKr or LoHa, which Diffusers does not load"):
        export_lora(run[0] / "runs/tuned", tmp_path / "a.safetensors", "lora/diffusers")


def test_a_whole_lokr_of_another_scale_is_no_file_of_other_programs(tmp_path):
    torch.manual_seed(4)
    origin = tmp_path / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    adapter = {"targets": ["to_q"], "kind": "lokr", "rank": 16, "alpha": 4.0}
    config = runs.config_of(tmp_path, runs.VIDEO, train={"epochs": 1, "adapters": [adapter]})
    runs.trained(config, origin)
    with pytest.raises(ContractError, match=r"which other programs scale by 1, but its scale is 0\.25"):
        export_lora(tmp_path / "runs/tuned", tmp_path / "a.safetensors", "lora/comfyui")
    (file, *_) = export_lora(tmp_path / "runs/tuned", tmp_path / "style", "lora/peft")
    assert {scale.factor for scale in open_adapter(file.parent).scales.values()} == {0.25}


def test_what_does_not_go_together_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="dora, rslora, dropout and init do not work with kind: lokr"):
        AdapterConfig(("q",), kind="lokr", dora=True)
    two = [{"targets": ["to_q"], "kind": "loha"}, {"name": "b", "targets": ["to_k"]}]
    config = runs.config_of(tmp_path, runs.VIDEO, train={"epochs": 1, "adapters": two})
    with pytest.raises(PlanError, match="adapters of several kinds: loha, lora"):
        build_task(config)
    train = {"epochs": 1, "adapters": two[:1], "base_dtype": "nf4"}
    config = runs.config_of(tmp_path, runs.VIDEO, "nf4", train=train)
    with pytest.raises(PlanError, match="those of nf4 are packed"):
        build_task(config)
