"""PiSSA: begins and trains as PEFT's, leaves the base as it is, and is PEFT's LoRA in files."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import Randomness
from mm_core.errors import PlanError
from mm_core.interchange.export import export
from mm_core.interchange.lora import export_lora
from mm_core.modules.adapter_layers import adapted_layers, adapter_of
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from mm_core.weights.adapters.inject import AdapterWeights, add_adapters, scales_of
from mm_core.weights.adapters.layouts import LAYOUTS
from mm_core.weights.adapters.pissa import principal, start_of
from mm_core.weights.fitting import formats_of
from support import runs
from support.tensors import close

RANK, ALPHA = 3, 6.0
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["0", "2"]}


class Task(nn.Module):
    trainable, frozen = ("model",), ()

    def __init__(self, adapter: AdapterConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12))
        add_adapters(self, (adapter,), {})
        self.adapter = adapter

    def begin(self, base: nn.Module) -> Task:
        weights = AdapterWeights(self, (self.adapter,), {})
        self.model.to_empty(device="cpu")
        initialise(self.model, "model", Randomness(0), weights.names)
        for own, given in zip((self.model[0], self.model[2]), (base[0], base[2]), strict=True):
            own.base_layer.load_state_dict(given.state_dict())
        weights.fill(self.state_dict())
        return self


def base() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12))


def fitted(model: nn.Module, steps: int = 20) -> list[float]:
    """Trains what needs gradients, and returns the losses."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(32, 10, generator=generator), torch.randn(32, 12, generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("rslora", [False, True])
def test_it_begins_and_trains_as_peft_s(rslora):
    theirs = peft.get_peft_model(
        base(), peft.LoraConfig(**CONFIG, use_rslora=rslora, init_lora_weights="pissa")
    )
    adapter = AdapterConfig(("0", "2"), rank=RANK, alpha=ALPHA, init="pissa", rslora=rslora)
    task = Task(adapter).begin(base())
    for own, other in zip((task.model[0], task.model[2]), (theirs.model[0], theirs.model[2]), strict=True):
        for part in ("lora_A", "lora_B"):
            mine, given = getattr(own, part)["default"].weight, getattr(other, part)["default"].weight
            torch.testing.assert_close(mine, given, rtol=1e-6, atol=1e-7)
    x = torch.randn(4, 10)
    torch.testing.assert_close(task.model(x), base()(x), rtol=1e-5, atol=1e-6)
    mine, given = fitted(task.model), fitted(theirs)
    assert mine[-1] < 0.9 * mine[0]
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(given), rtol=1e-5, atol=0)
    bare = base().state_dict()
    assert all(torch.equal(task.model[i].base_layer.weight, bare[f"{i}.weight"]) for i in (0, 2))
    learning = {adapter_of(name)[2] for name, p in task.model.named_parameters() if p.requires_grad}
    assert learning == {"default"}


def test_the_approximation_is_near_the_exact_part():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)) @ torch.diag(
        0.5 ** torch.arange(30)
    )
    (a, b), (near_a, near_b) = (principal(weight, 4, 2.0, init) for init in ("pissa", "pissa_niter_16"))
    torch.testing.assert_close(near_b @ near_a, b @ a, rtol=1e-4, atol=1e-4)
    size = torch.linalg.svdvals(weight)[4]
    assert torch.linalg.matrix_norm(weight - 2 * b @ a, 2).item() == pytest.approx(size.item(), rel=1e-4)


def test_a_start_is_no_adapter_of_the_user():
    found = scales_of(Task(AdapterConfig(("0",), rank=2, init="pissa")).model)
    assert list(found) == ["default", start_of("default")]
    with pytest.raises(ValueError, match="must be at most 64 letters, digits"):
        AdapterConfig(("0",), name=start_of("default"))


@pytest.mark.parametrize("fields", [{"dora": True}, {"from_": "a.safetensors", "targets": ()}])
def test_it_does_not_go_with_every_setting(fields):
    with pytest.raises(ValueError, match="init: pissa does not work with dora or from"):
        AdapterConfig(**{"targets": ("0",), "init": "pissa", **fields})


def test_a_rank_above_that_of_the_weight_is_refused():
    with pytest.raises(PlanError, match=r"model\.0 has 10 singular values, and the adapter's rank is 11"):
        Task(AdapterConfig(("0",), rank=11, init="pissa"))


# -- a run ---------------------------------------------------------------------------------------

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "out_channels": 12}
WAN |= {key: runs.DIT[key] for key in ("num_layers", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")}
ADAPTER = {"targets": ["to_q", "ffn.net.2"], "rank": 3, "alpha": 6.0, "ranks": {"to_q": 2}, "init": "pissa"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, the published base and the task of a run that trained a PiSSA."""
    folder = tmp_path_factory.mktemp("pissa")
    torch.manual_seed(4)
    origin = folder / "wan"
    WanTransformer3DModel(**WAN, patch_size=(2, 2, 2), cross_attn_norm=True).save_pretrained(origin)
    config = runs.config_of(folder, runs.VIDEO, train={"epochs": 1, "adapters": [ADAPTER]})
    return folder, origin, runs.trained(config, origin)


@pytest.mark.slow
def test_its_file_is_the_lora_that_peft_converts_to(run, tmp_path):
    folder, origin, task = run
    export_lora(folder / "runs/tuned", tmp_path / "ours", "lora/peft")
    settings = {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 6.0}}
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["to_q", "ffn.net.2"], init_lora_weights="pissa", **settings
    )
    theirs = peft.get_peft_model(WanTransformer3DModel.from_pretrained(origin), config)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    own = dict(task.predictor.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if adapter_of(name):
                parameter.copy_(own[name.removeprefix("base_model.model.")])
    start = str(tmp_path / "start")
    theirs.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=start)
    found, expected = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert found.keys() == expected.keys() and len(found) == 12
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    texts = [json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs")]
    assert [(text["r"], text["lora_alpha"]) for text in texts] in ([(4, 12), (6, 12)], [(6, 12), (6, 12)])


@pytest.mark.slow
def test_merged_weights_have_the_change_of_the_run(run, tmp_path):
    folder, origin, task = run
    merged = export(folder / "runs/tuned", tmp_path / "merged", "wan_transformer", merge_adapters=True)
    before = WanTransformer3DModel.from_pretrained(origin).state_dict()
    after = WanTransformer3DModel.from_pretrained(merged).state_dict()
    for path, change in changes(task).items():
        close(after[f"{path}.weight"], before[f"{path}.weight"] + change)


@pytest.mark.slow
@pytest.mark.parametrize("label", LAYOUTS)
def test_every_layout_has_the_change_of_the_run(run, label, tmp_path):
    folder, _, task = run
    out = tmp_path / ("style" if label == "lora/peft" else "style.safetensors")
    export_lora(folder / "runs/tuned", out, label)
    config = runs.config_of(tmp_path, runs.VIDEO, train={"epochs": 1, "adapters": [{"from": str(out)}]})
    again = build_task(config)
    weights = AdapterWeights(again, config.train.adapters, formats_of(config.registry))
    state = {n: torch.empty(p.shape) for n, p in again.named_parameters() if n in weights.names}
    weights.fill(state)
    layers, expected = adapted_layers(again.predictor), changes(task)
    assert layers.keys() == expected.keys() and len(layers) == 6
    for path, layer in layers.items():
        a, b = (state[f"predictor.{path}.{part}.default.weight"] for part in ("lora_A", "lora_B"))
        assert len(a) == (6 if path.endswith("net.2") else 4)
        close(layer.scaling["default"] * b @ a, expected[path])


def changes(task: nn.Module) -> dict[str, torch.Tensor]:
    layers = adapted_layers(task.predictor)
    return {
        path: sum(layer.get_delta_weight(name).detach() for name in layer.adapter_scales)
        for path, layer in layers.items()
    }
