"""Exports of subclasses of a library's models use a class that the library exports, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from diffusers import AutoModel, UNet2DModel
from safetensors.torch import save_file
from torch import nn

from mm_core.errors import MMError
from mm_core.interchange.export_plan import Planner
from mm_core.weights.formats.libraries import Diffusers, Transformers

UNET = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
}
UNET |= {
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D",) * 2,
    "up_block_types": ("UpBlock2D",) * 2,
}
QWEN = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


class Mine(UNet2DModel):
    """A different signature, the same model."""

    def forward(self, latents, timestep):
        return super().forward(latents, timestep, return_dict=False)[0]


class Deeper(Mine):
    """Two steps away."""


class Scaled(UNet2DModel):
    def __init__(self, scale: float = 2.0, **others) -> None:
        super().__init__(**others)
        self.register_to_config(scale=scale)


class Added(UNet2DModel):
    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        self.gate = nn.Parameter(torch.ones(1))


class MyQwen(transformers.Qwen3ForCausalLM):
    pass


def written(form, model: nn.Module, folder: Path) -> Path:
    layout = form.layout("predictor", model)
    assert layout.refusal() == ""
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / f"{layout.stem}.safetensors", {"format": "pt"})
    for name, text in layout.texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", [UNet2DModel, Mine, Deeper])
def test_diffusers_loads_a_subclass_as_its_own_class(kind, tmp_path):
    torch.manual_seed(0)
    model = kind(**UNET).eval()
    folder = written(Diffusers(), model, tmp_path / "a")
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "UNet2DModel"
    assert Diffusers().layout("predictor", model).loading.startswith("from diffusers import UNet2DModel\n")
    loaded = AutoModel.from_pretrained(str(folder))
    assert type(loaded) is UNet2DModel
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = model(x, 10)
        expected = expected if isinstance(expected, torch.Tensor) else expected.sample
        # Convolutions round by where weights lie in memory: so does a model that the library saved itself.
        torch.testing.assert_close(loaded(x, 10).sample, expected, rtol=0, atol=2e-6)
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.state_dict().items())


def test_transformers_loads_a_subclass_as_its_own_class(tmp_path):
    model = MyQwen(transformers.Qwen3Config(**QWEN)).eval()
    folder = written(Transformers(), model, tmp_path / "a")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Added, "Added can no longer be loaded as UNet2DModel: it adds gate"),
        (Scaled, "Scaled can no longer be loaded as UNet2DModel: it has options of its own: scale"),
    ],
)
def test_a_subclass_that_is_another_model_is_refused(kind, why):
    with torch.device("meta"):
        model = kind(**UNET)
    planner = Planner(None, "core/diffusers", Diffusers(), None, None, 10)
    with pytest.raises(MMError) as fault:
        planner.weights("predictor", model)
    assert str(fault.value) == (
        f"--to core/diffusers: predictor: {why}\n"
        "  accepted: core/safetensors, which can store any component with its own names"
    )


def test_a_transformers_subclass_with_another_config_is_refused():
    class MyConfig(transformers.Qwen3Config):
        model_type = "mine"

    model = MyQwen(MyConfig(**QWEN))
    why = Transformers().layout("model", model).refusal()
    assert (
        why
        == "MyQwen can no longer be loaded as Qwen3ForCausalLM: its config is a MyConfig, not a Qwen3Config"
    )
