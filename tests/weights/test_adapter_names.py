"""Adapters of vision-language models under the module names of other versions of Transformers."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
)

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.errors import CheckpointError
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import AdapterWeights, add_adapters
from mm_core.weights.fitting import formats_of
from support.tiny_models import Task

FORMATS = formats_of(get_registry(()))
TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
MAKE = {
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(text_config=Qwen2Config(**TEXT), vision_config=CLIPVisionConfig(**VISION))
    ),
    "internvl": lambda: InternVLForConditionalGeneration(
        InternVLConfig(
            text_config=Qwen2Config(**TEXT),
            vision_config=InternVLVisionConfig(**VISION | {"image_size": [28, 28], "patch_size": [14, 14]}),
        )
    ),
}
OF_NOW = "base_model.model.model.language_model.layers."
NAMES = {  # what a version of the library, or a program around it, calls the layers
    "now": OF_NOW,
    "before 4.52": "base_model.model.language_model.model.layers.",
    "before 4.52, compiled": "base_model.model._orig_mod.language_model.model.layers.",
    "before 4.52, in DDP": "base_model.model.module.language_model.model.layers.",
    "without PEFT's prefix": "language_model.model.layers.",
}


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vlm = model


def saved(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The changes of the weights by an adapter that PEFT saves, by module of the model."""
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=r".*language_model.*(q_proj|down_proj)")
    model = peft.get_peft_model(MAKE[kind](), config)
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            parameter.normal_()
    model.save_pretrained(folder)
    return {
        name: layer.get_delta_weight("default")
        for name, layer in adapted_layers(model.base_model.model).items()
    }


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", MAKE)
def test_an_adapter_is_read_under_the_names_of_every_version(kind, names, wrapped, tmp_path):
    changes = saved(kind, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    assert all(name.startswith(OF_NOW) for name in tensors)
    save_file({NAMES[names] + name.removeprefix(OF_NOW): tensor for name, tensor in tensors.items()}, file)
    with torch.device("meta"):
        model = MAKE[kind]()
    task = Task(model=Wrapped(model) if wrapped else model)
    adapters = [AdapterConfig(from_=str(tmp_path))]
    add_adapters(task, adapters, FORMATS)
    weights = AdapterWeights(task, adapters, FORMATS)
    task.to_empty(device="cpu")
    weights.fill(task.state_dict())
    layers = adapted_layers(model)
    assert layers.keys() == changes.keys() and len(layers) == 4
    for name, layer in layers.items():
        torch.testing.assert_close(layer.get_delta_weight("default"), changes[name])


def test_an_adapter_of_the_language_model_alone_is_one_for_a_different_model(tmp_path):
    tensors = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 16)}
    tensors["model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.ones(16, 2)
    save_file(tensors, tmp_path / "a.safetensors")
    with torch.device("meta"):
        task = Task(model=MAKE["llava"]())
    with pytest.raises(CheckpointError, match="or gives modules names unlike those here"):
        add_adapters(task, [AdapterConfig(from_=str(tmp_path / "a.safetensors"))], FORMATS)
