"""Which layers an adapter has, with which ranks, alphas and rates; and a base in 8 or 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.config.sections import ParameterGroup, TrainSection
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.modules.quantised import QuantisedLinear, dequantise, quantise, quantise_base, rounded
from mm_core.optim.parameter_groups import groups_of
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import add_adapters, scales_of
from mm_core.weights.fitting import formats_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block.out(block.q(x) + block.k(x)) for block in self.blocks)


class Task(nn.Module):
    trainable, frozen = ("predictor",), ("text_encoder",)

    def __init__(self, *adapters: AdapterConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = Model()
        add_adapters(self, adapters, formats_of(get_registry(())))


def table(adapter: AdapterConfig) -> dict[str, tuple[int, float]]:
    (scales,) = scales_of(Task(adapter).predictor).values()
    return {path.removeprefix("blocks."): (scale.rank, scale.alpha) for path, scale in scales.items()}


def test_modules_are_left_out_and_have_other_ranks_and_alphas_by_pattern():
    adapter = AdapterConfig(
        ("predictor",),
        exclude=("out", "predictor.blocks.{2}"),
        rank=4,
        ranks={"q": 2, "predictor.blocks.{1}.q": 8},
        alphas={"predictor.blocks.{0}": 1.0},
    )
    assert table(adapter) == {"0.q": (2, 1.0), "0.k": (4, 1.0), "1.q": (8, 8), "1.k": (4, 4)}


@pytest.mark.parametrize("field", ["exclude", "ranks", "alphas"])
def test_a_pattern_that_matches_nothing_is_named(field):
    value = ("v",) if field == "exclude" else {"v": 2}
    with pytest.raises(PlanError, match="the target 'v' of the adapter 'default' matches no linear layer"):
        table(AdapterConfig(("q",), **{field: value}))
    with pytest.raises(ValueError, match="do not work with from"):
        AdapterConfig(from_="a.safetensors", **{field: value})


@pytest.mark.parametrize("field", ["exclude", "ranks", "alphas"])
def test_a_pattern_that_matches_no_layer_of_the_adapter_is_named(field):
    value = ("out", "k") if field == "exclude" else {"q": 3, "k": 2}
    with pytest.raises(PlanError) as caught:
        table(AdapterConfig(("q", "out"), **{field: value}))
    assert str(caught.value).startswith(
        f"train.adapters: 'k' in {field} of the adapter 'default' matches none of its layers\n"
        "  accepted: patterns of its layers, or ends of their paths: 'out', 'q'\n"
    )
    if field != "exclude":  # one that is left out has no rank either
        with pytest.raises(PlanError, match=f"'k' in {field} of the adapter 'default'"):
            table(AdapterConfig(("q", "k"), exclude=("k",), **{field: {"k": 2}}))


@pytest.mark.parametrize("target", ["text_encoder.layers.{*}.q", "text_encoder"])
def test_an_adapter_on_a_text_encoder_is_refused_with_the_reason(target):
    with pytest.raises(PlanError, match="for text_encoder, which computes without gradients"):
        Task(AdapterConfig((target,)))


def test_an_adapter_without_modules_is_refused():
    with pytest.raises(PlanError, match="exclude leaves the adapter 'default' no module"):
        table(AdapterConfig(("q",), exclude=("predictor.blocks.{*}",)))


def test_the_second_factor_has_its_own_rate():
    adapter = AdapterConfig(("q", "k"), b_lr_scale=16.0)
    task = Task(adapter)
    named = {n: p for n, p in task.named_parameters() if p.requires_grad}
    half = ParameterGroup(match=("predictor.blocks.{0}",), lr_scale=0.5)
    train = TrainSection(steps=1, adapters=(adapter,), parameter_groups=(half,))
    rates = {name: group.get("lr_scale", 1.0) for group in groups_of(named, train) for name in group["names"]}
    for name in named:
        expected = (0.5 if ".blocks.0." in name else 1.0) * (16.0 if "lora_B" in name else 1.0)
        assert rates[name] == expected, name
    assert len(rates) == len(named) == 12


# -- a base in 8 or 4 bits -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "size"), [("int8", 8e-3, 1.01), ("fp8", 3e-2, 1.01), ("nf4", 0.1, 0.54)]
)
def test_quantised_weights_are_near_and_small(kind, error, size):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    codes, scale = quantise(weight, kind)
    near = dequantise(codes, scale, kind, torch.float32)
    assert (near - weight).norm() / weight.norm() < error
    assert (codes.nbytes + scale.nbytes) / weight.numel() < size
    assert torch.equal(rounded(near, kind), near), "their values are exact"
    halves = [quantise(part, kind) for part in weight.split([41, 55])]
    assert torch.equal(torch.cat([half[0] for half in halves]), codes), "rows are independent"


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_quantised_layer_computes_with_its_values_and_passes_gradients(kind):
    torch.manual_seed(2)
    plain = nn.Linear(64, 24)
    with torch.device("meta"):
        layer = QuantisedLinear(nn.Linear(64, 24), kind)
    layer.to_empty(device="cpu")
    layer.take(plain.weight.detach())
    with torch.no_grad():
        layer.bias.copy_(plain.bias)
        plain.weight.copy_(rounded(plain.weight, kind))
    xs = [torch.randn(3, 5, 64).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        xs[1].copy_(xs[0])
    outs = [plain(xs[0]), layer(xs[1])]
    torch.testing.assert_close(outs[1], outs[0])
    for out in outs:
        (out**2).sum().backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    assert layer.state_dict()["weight"].is_meta and layer.state_dict()["weight"].shape == (24, 64)


class WithoutFloat8(TorchDispatchMode):
    """A stand-in for a device that lacks fp8: it has no conversion to or from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kinds = {getattr(args[0], "dtype", None), (kwargs or {}).get("dtype")}
        if func is torch.ops.aten._to_copy.default and torch.float8_e4m3fn in kinds:
            raise NotImplementedError("_to_copy is not implemented for Float8\nin a stack of calls")
        return func(*args, **(kwargs or {}))


def test_a_dtype_that_the_device_lacks_is_one_sentence():
    task, other = Task(AdapterConfig(("q",))), Task(AdapterConfig(("q",)))
    quantise_base(task, ["predictor.blocks.0"], "fp8")
    quantise_base(other, ["predictor.blocks.0"], "nf4")
    task.frozen = other.frozen = ()
    engine = FSDP2Engine(param_dtype="bf16")
    with WithoutFloat8(), pytest.raises(PlanError) as caught:
        engine.plan(task, 1, 2)
    assert str(caught.value) == (
        "train.base_dtype: cpu cannot compute with a base in fp8: _to_copy is not implemented for Float8\n"
        "  accepted: bf16, int8, nf4"
    )
    assert engine.plan(task, 1, 2).compute_dtype == "bf16", "this device has it"
    with WithoutFloat8():
        assert engine.plan(other, 1, 2).compute_dtype == "bf16"


def test_the_levels_of_nf4_are_the_published_ones():
    """The table in appendix E of https://arxiv.org/abs/2305.14314, to four digits."""
    below = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    above = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    weight = torch.tensor([[*below, *above]])
    torch.testing.assert_close(rounded(weight, "nf4"), weight, rtol=0, atol=1e-4)
