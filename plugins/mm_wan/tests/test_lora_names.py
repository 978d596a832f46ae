"""LoRAs as other programs name them (ComfyUI, kohya's scripts, Diffusers, PEFT) change weights alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.predictor.two_expert import TwoExpert
from safetensors.torch import save_file
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import Randomness
from mm_core.errors import CheckpointError
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.modules.initialise import initialise
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import AdapterWeights, add_adapters
from mm_core.weights.fitting import formats_of

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "in_channels": 4,
    "out_channels": 4,
}
TINY |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 40, "rope_max_seq_len": 32}
MODULES = {  # path here -> alpha; None: the file holds none, and the adapter counts by 1
    "blocks.0.attn1.to_q": 2.0,
    "blocks.1.attn2.to_out.0": 8.0,
    "blocks.1.ffn.net.0.proj": 0.5,
    "condition_embedder.time_proj": None,
}
LOW = "pytorch_lora_weights_2.safetensors"
RANKS = dict(zip(MODULES, (4, 2, 3, 5), strict=True))


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self, path: Path | None = None, train: str | None = None) -> None:
        super().__init__()
        formats = formats_of(get_registry(()))
        adapters = [AdapterConfig(from_=str(path))] if path else []
        with torch.device("meta"):
            self.predictor = TwoExpert(train=train, **TINY) if train else WanTransformer(**TINY)
        add_adapters(self, adapters, formats)
        weights = AdapterWeights(self, adapters, formats)
        self.predictor.to_empty(device="cpu")
        initialise(self.predictor, "predictor", Randomness(0), weights.names)
        weights.fill(self.state_dict())


def theirs(module: str) -> str:
    return ORIGINAL_KEYS.renamed(f"{module}.weight").removesuffix(".weight")


@pytest.fixture(scope="module")
def factors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    bare = Task().predictor
    generator = torch.Generator().manual_seed(1)
    found = {}
    for module, rank in RANKS.items():
        rows, columns = bare.get_submodule(module).weight.shape
        sizes = ((rank, columns), (rows, rank))
        found[module] = tuple(torch.randn(size, generator=generator) * 0.2 for size in sizes)
    return found


def keys(name: str, first: str, second: str) -> dict[str, str]:
    return {"lora_A": f"{name}.{first}.weight", "lora_B": f"{name}.{second}.weight", "alpha": f"{name}.alpha"}


NAMES = {
    "comfyui": lambda m: keys(f"diffusion_model.{theirs(m)}", "lora_A", "lora_B"),
    "comfyui down and up": lambda m: keys(f"diffusion_model.{theirs(m)}", "lora_down", "lora_up"),
    "kohya": lambda m: keys(f"lora_unet_{theirs(m).replace('.', '_')}", "lora_down", "lora_up"),
    "wan without a prefix": lambda m: keys(theirs(m), "lora_A", "lora_B"),
    "diffusers": lambda m: keys(f"transformer.{m}", "lora_A", "lora_B"),
    "old diffusers": lambda m: keys(f"transformer.{m}", "lora.down", "lora.up"),
    "kohya of diffusers": lambda m: keys(f"lora_unet_{m.replace('.', '_')}", "lora_down", "lora_up"),
    "peft": lambda m: keys(f"base_model.model.{m}", "lora_A", "lora_B"),
}


def written(path: Path, style: str, factors, dtype=torch.float32, shape=()) -> Path:
    tensors = {}
    for module, (first, second) in factors.items():
        names = NAMES[style](module)
        tensors |= {names["lora_A"]: first.to(dtype), names["lora_B"]: second.to(dtype)}
        if MODULES[module] is not None:
            tensors[names["alpha"]] = torch.full(shape, MODULES[module], dtype=dtype)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("style", NAMES)
def test_the_same_lora_changes_the_weights_alike_under_all_names(style, factors, tmp_path):
    shape = (1,) if "kohya" in style else ()
    adapted = adapted_layers(Task(written(tmp_path / "a.safetensors", style, factors, shape=shape)).predictor)
    bare = Task().predictor
    assert adapted.keys() == MODULES.keys()
    for module, (first, second) in factors.items():
        alpha = MODULES[module] if MODULES[module] is not None else RANKS[module]
        weight = bare.get_submodule(module).weight.double()
        expected = weight + alpha / RANKS[module] * (second.double() @ first.double())
        layer = adapted[module]
        found = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()
        assert torch.equal(layer.base_layer.weight.double(), weight)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        x = torch.linspace(-1, 1, weight.shape[1])
        bias = bare.get_submodule(module).bias.double()
        torch.testing.assert_close(layer(x).double(), expected @ x.double() + bias, rtol=0, atol=1e-5)


def read_by(train, path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Module of a two-expert task -> the factors that it took from `path`."""
    found = adapted_layers(Task(path, train).predictor)
    return {
        name: {part: getattr(layer, part)["default"].weight.detach() for part in ("lora_A", "lora_B")}
        for name, layer in found.items()
    }


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name]["lora_A"], first) and torch.equal(found[name]["lora_B"], second)
        for name, (first, second) in expected.items()
    )


@pytest.mark.parametrize("style", NAMES)
def test_an_expert_takes_a_lora_under_all_names(style, factors, tmp_path):
    high, low = (tmp_path / name for name in ("pytorch_lora_weights.safetensors", LOW))
    written(high, style, factors)
    fewer = {name: (a * 2, b * 2) for name, (a, b) in list(factors.items())[1:]}
    written(low, style, fewer)
    lows = {f"low.{name}": pair for name, pair in fewer.items()}
    highs = {f"high.{name}": pair for name, pair in factors.items()}
    single = written(tmp_path / "style.safetensors", style, factors)
    assert same(read_by("high", single), highs)
    assert same(read_by("low", single), {f"low.{name}": pair for name, pair in factors.items()})
    for train, expected in (("both", highs | lows), ("high", highs), ("low", lows)):
        assert same(read_by(train, tmp_path), expected)
    assert same(read_by("both", low), lows)
    with pytest.raises(CheckpointError, match="fits several components equally well") as fault:
        Task(single, "both")
    assert "predictor.high, predictor.low\n" in str(fault.value)


def test_bf16_files_are_read_too(factors, tmp_path):
    path = written(tmp_path / "a.safetensors", "kohya", factors, torch.bfloat16)
    layer = adapted_layers(Task(path).predictor)["blocks.1.ffn.net.0.proj"]
    assert layer.scaling["default"] == 0.5 / 3
    first = factors["blocks.1.ffn.net.0.proj"][0]
    assert torch.equal(layer.lora_A["default"].weight.detach(), first.bfloat16().float())


def changed(path: Path, factors, **tensors: torch.Tensor) -> str:
    names = {}
    for module, (first, second) in factors.items():
        own = NAMES["comfyui"](module)
        names |= {own["lora_A"]: first, own["lora_B"]: second}
    save_file(names | tensors, path)
    with pytest.raises(CheckpointError) as fault:
        Task(path)
    return str(fault.value)


@pytest.mark.parametrize("ending", ["diff", "diff_b"])
def test_changes_of_whole_weights_that_are_no_additions_are_refused_by_name(ending, factors, tmp_path):
    name = f"diffusion_model.blocks.0.self_attn.q.{ending}"
    text = changed(tmp_path / "a.safetensors", factors, **{name: torch.zeros(7)})
    assert text == (
        f"{tmp_path}/a.safetensors: this file also changes 1 full tensor of another shape or form than"
        f" predictor's: {name}\n"
        "  accepted: additions (diff, diff_b, diff_m) to tensors of the model, of the same shape\n"
        "  hint: merge it into the weights with the program it was made for, and start from the result"
    )


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_none_is_refused(alpha, factors, tmp_path):
    name = f"diffusion_model.{theirs('blocks.0.attn1.to_q')}.alpha"
    text = changed(tmp_path / "a.safetensors", factors, **{name: torch.tensor(alpha)})
    assert f"lora_alpha is {alpha!r}\n  accepted: a number above 0" in text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("diffusion_model.blocks.1.self_attn.q.alpha", torch.tensor(2.0)),  # of a module that has no factors
        ("diffusion_model.blocks.0.self_attn.q.alpha", torch.ones(3)),
        ("diffusion_model.blocks.0.self_attn.q.dora_scale", torch.ones(1, 24)),  # by columns
        ("diffusion_model.blocks.0.self_attn.q.lora_down.weight", torch.ones(4, 24)),  # a second factor
        ("diffusion_model.blocks.0.self_attn.k.lora_A.weight", torch.tensor(1.0)),
        ("diffusion_model.blocks.0.self_attn.k.lora_A.weight", torch.ones(0, 24)),
        ("diffusion_model.patch_embedding.lora_A.weight", torch.ones(2, 4, 1, 2, 2)),  # a convolution's
    ],
)
def test_what_is_no_part_of_a_lora_is_named(name, tensor, factors, tmp_path):
    text = changed(tmp_path / "a.safetensors", factors, **{name: tensor})
    assert f"this is not a LoRA of linear layers: it contains {name}\n" in text


def test_a_lora_of_another_model_is_still_refused(factors, tmp_path):
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    both = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    text = changed(tmp_path / "a.safetensors", factors, **both)
    assert (
        "1 of the 5 modules in this adapter match no linear layer of predictor: double_blocks.0.img" in text
    )
