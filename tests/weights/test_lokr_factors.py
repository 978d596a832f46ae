"""LoKrs whose weights are split by other factors than PEFT's, as LyCORIS and musubi-tuner write them."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from lycoris import LycorisNetwork, create_lycoris
from lycoris.functional.general import factorization
from lycoris.modules.lokr import LokrModule
from peft.tuners.lokr.layer import factorization as peft_factorization
from safetensors.torch import load_file, save_file
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import Randomness
from mm_core.errors import CheckpointError, ContractError
from mm_core.modules.initialise import initialise
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.files import merge, open_adapter
from mm_core.weights.adapters.inject import AdapterWeights, Structure, add_adapters, scales_of
from mm_core.weights.adapters.kinds import split
from mm_core.weights.adapters.record import record_of, structure_in
from mm_core.weights.adapters.written import peft_settings
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import AdapterLayout

FORMATS = formats_of(get_registry(()))
SIZES = {"up": (24, 64), "down": (64, 24), "square": (24, 24), "wide": (24, 40)}


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.ModuleDict({name: nn.Linear(*size) for name, size in SIZES.items()})


class Task(nn.Module):
    trainable, frozen = ("model",), ()

    def __init__(self, *adapters: AdapterConfig, known: Structure | None = None) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = plain()
        add_adapters(self, adapters, FORMATS, known=known)
        self.adapters = adapters

    def begin(self) -> Task:
        weights = AdapterWeights(self, self.adapters, FORMATS)
        self.model.to_empty(device="cpu")
        initialise(self.model, "model", Randomness(0), weights.names)
        own = plain().state_dict()
        for name, tensor in self.model.state_dict().items():
            if (base := name.replace(".base_layer.", ".")) in own:
                tensor.copy_(own[base])
        weights.fill(self.state_dict())
        return self


def written(path: Path, rank: int, **options) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LoKr that LyCORIS wrote, and the change of each layer's output for inputs of one in each column."""
    model = plain()
    before = {name: layer.weight.detach().clone() for name, layer in model.items()}
    network = create_lycoris(model, 1.0, linear_dim=rank, linear_alpha=3.0, algo="lokr", **options)
    network.apply_to()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3, generator=generator)
        model.eval()
        network.eval()
        after = {name: (layer(torch.eye(SIZES[name][0])) - layer.bias).T for name, layer in model.items()}
    state = network.state_dict()
    prefix = f"{LycorisNetwork.LORA_PREFIX}_"
    save_file({f"lora_unet_{name.removeprefix(prefix)}": t.contiguous() for name, t in state.items()}, path)
    return path, {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("rank", [1, 2, 10_000])
@pytest.mark.parametrize(
    "options",
    [
        *({"factor": factor} for factor in (-1, 2, 4, 8, 16, 5)),
        {"factor": 4, "unbalanced_factorization": True},
    ],
    ids=str,
)
def test_a_lokr_of_lycoris_of_any_factor_changes_the_weights_as_there(options, rank, tmp_path):
    path, changes = written(tmp_path / "k.safetensors", rank, **options)
    task = Task(AdapterConfig(from_=str(path))).begin()
    assert all(change.abs().max() > 0.01 for change in changes.values())
    for name, change in changes.items():
        layer = task.model[name]
        torch.testing.assert_close(layer.get_delta_weight("default"), change, rtol=1e-4, atol=1e-5)
        x = torch.randn(2, SIZES[name][0])
        expected = x @ (layer.base_layer.weight + change).T + layer.base_layer.bias
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        scale = layer.adapter_scales["default"]
        parts = {key: t for key, t in load_file(path).items() if key.startswith(f"lora_unet_{name}.lokr")}
        merged = merge(layer.base_layer.weight, [(scale, {k.partition(".")[2]: t for k, t in parts.items()})])
        torch.testing.assert_close(merged, layer.base_layer.weight + change, rtol=1e-4, atol=1e-5)


def test_a_size_is_split_as_lycoris_and_peft_split_it():
    for size in (*range(1, 130), 360, 1024, 1536, 5120, 13824):
        for factor in (None, 1, 2, 3, 4, 5, 8, 12, 16, 100):
            given = -1 if factor is None else factor
            assert split(size, factor) == factorization(size, given)
            assert split(size, factor, ordered=False) == peft_factorization(size, given)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_new_lokr_is_split_by_the_factor_of_the_config(factor):
    task = Task(AdapterConfig(("model",), kind="lokr", rank=1, decompose_factor=factor)).begin()
    for name, (columns, rows) in SIZES.items():
        theirs = LokrModule(name, nn.Linear(columns, rows), lora_dim=1, factor=factor)
        layer = task.model[name]
        assert layer.lokr_w1["default"].shape == theirs.lokr_w1.shape
        assert layer.lokr_w2_a["default"].shape == theirs.lokr_w2_a.shape
        assert not layer.get_delta_weight("default").any(), "it starts from the unchanged model"
        assert layer.lokr_w2_b["default"].requires_grad and "default" not in layer.lokr_w2


def test_a_resume_has_the_sizes_of_the_run(tmp_path):
    path, _ = written(tmp_path / "k.safetensors", 1, factor=4, unbalanced_factorization=True)
    adapter = AdapterConfig(from_=str(path))
    begun = Task(adapter)
    known = structure_in(record_of(begun, [adapter]), tmp_path)
    path.unlink()
    again = Task(adapter, known=known)
    shapes = [{name: p.shape for name, p in task.named_parameters()} for task in (begun, again)]
    assert shapes[0] == shapes[1] and scales_of(begun.model) == scales_of(again.model)
    older = [
        {**row, "layers": [dict(layer) for layer in row["layers"]]} for row in record_of(begun, [adapter])
    ]
    older[0]["layers"][0]["blocks"] = [4, 4]
    with pytest.raises(CheckpointError, match="record of its adapters cannot be read"):
        structure_in(older, tmp_path)


@pytest.mark.parametrize(("factor", "stated"), [(None, -1), (2, 2), (4, 4)])
def test_peft_s_settings_have_the_factor(factor, stated):
    task = Task(AdapterConfig(("model",), kind="lokr", rank=1, decompose_factor=factor))
    settings = peft_settings(AdapterLayout("a.safetensors"), scales_of(task.model)["default"])
    assert settings["decompose_factor"] == stated
    theirs = peft.get_peft_model(plain(), peft.LoKrConfig(**settings)).base_model.model
    for name, layer in task.model.items():
        assert theirs[name].lokr_w2_b["default"].shape == layer.lokr_w2_b["default"].shape


def test_a_lokr_that_peft_cannot_have_is_refused_for_its_files_alone(tmp_path):
    path, _ = written(tmp_path / "k.safetensors", 1, factor=4, unbalanced_factorization=True)
    scales = open_adapter(path).scales
    with pytest.raises(ContractError, match="splits its weights in a way that PEFT does not have"):
        peft_settings(AdapterLayout("a.safetensors"), scales)


def test_a_lokr_of_another_model_or_of_a_strange_rank_is_refused(tmp_path):
    path, _ = written(tmp_path / "k.safetensors", 1, factor=2)
    tensors = load_file(path)
    save_file(tensors | {"lora_unet_up.lokr_w1": torch.ones(3, 2)}, path)
    with pytest.raises(CheckpointError) as caught:
        Task(AdapterConfig(from_=str(path)))
    assert "the LoKr of up is for a weight of 96 x 24, but this one has 64 x 24" in str(caught.value)
    high = {"lora_unet_up.lokr_w2_a": torch.ones(32, 30), "lora_unet_up.lokr_w2_b": torch.ones(30, 12)}
    save_file(tensors | high, path)
    with pytest.raises(
        CheckpointError, match=r"has shape \[32, 30\], but model\.up\.lokr_w2_a\.default has none"
    ):
        Task(AdapterConfig(from_=str(path))).begin()


def test_the_factor_is_one_of_lokr_and_not_of_a_file():
    with pytest.raises(ValueError, match="decompose_factor works only with kind: lokr"):
        AdapterConfig(("q",), decompose_factor=4)
    with pytest.raises(ValueError, match="and decompose_factor do not work with from"):
        AdapterConfig(from_="a", kind="lokr", decompose_factor=4)
