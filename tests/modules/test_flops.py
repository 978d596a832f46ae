"""FLOPs of a step from a predictor's products equal exactly those that torch counts."""

from __future__ import annotations

import pytest
import torch
from mm_custom_dit.model import CustomDiT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_core.contracts import StepFlops, SupportsModuleFlops, attention_flops, linear_flops
from mm_core.modules.flops import counted_flops, step_flops
from mm_core.parallel.activation_checkpointing import recompute

TINY = {"num_layers": 3, "num_heads": 2, "head_dim": 16, "in_channels": 4, "out_channels": 4}
TINY |= {"text_dim": 24, "freq_dim": 12, "ffn_dim": 40}


def dit() -> CustomDiT:
    with torch.device("meta"):
        return CustomDiT(**TINY)


def arguments(per_token: bool = False) -> dict[str, torch.Tensor]:
    """On meta, where nothing is computed: 2 clips of 3 x 4 x 5 tokens, 7 tokens of text."""
    with torch.device("meta"):
        return {
            "latents": torch.empty(2, 4, 3, 8, 10),
            "timestep": torch.empty(2, 60) if per_token else torch.empty(2),
            "text": torch.empty(2, 7, 24),
        }


def counted(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[int, int]:
    """What torch counts of a forward and of its backward, attention as matrix products."""
    mask = torch.ones(2, 7, dtype=torch.bool, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predicted = model(**given, text_mask=mask)
        forward = counter.get_total_flops()
        if predicted.requires_grad:
            predicted.sum().backward()
    return forward, counter.get_total_flops() - forward


def said(model: CustomDiT, given: dict[str, torch.Tensor], *recomputed: str) -> StepFlops:
    assert isinstance(model, SupportsModuleFlops)
    return step_flops(model, model.module_flops(**{n: t.shape for n, t in given.items()}), recomputed)


TRAINED = {
    "all": ("",),
    "nothing": (),
    "the second block": ("blocks.1.",),
    "its feed-forward": ("blocks.1.ffn.",),
    "keys of the text": ("blocks.0.attn2.to_k.",),
    "the text's embedder": ("condition_embedder.text_embedder.linear_1.",),
    "the head": ("proj_out.",),
    "a table": ("blocks.2.scale_shift_table",),
    "all but the first layer": ("blocks", "condition_embedder", "proj_out"),
}


@pytest.mark.parametrize("prefixes", TRAINED.values(), ids=TRAINED)
def test_forward_and_backward_are_those_that_torch_counts_whatever_is_trained(prefixes):
    model = dit()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes) if prefixes else False)
    found = said(model, arguments())
    assert (found.forward, found.backward) == counted(model, arguments())
    assert found.useful == found.forward + found.backward and found.recomputed == 0


def test_a_timestep_for_each_token_is_counted():
    assert said(dit(), arguments(per_token=True)).forward == counted(dit(), arguments(per_token=True))[0]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")  # the second of two adapters
@pytest.mark.parametrize("targets", [["to_q", "to_v"], ["to_k", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]])
@pytest.mark.parametrize("adapters", [("one",), ("one", "two")])
def test_adapters_are_counted_and_no_gradient_of_the_weights_below_them(targets, adapters):
    peft = pytest.importorskip("peft")
    model = dit().requires_grad_(False)
    for name in adapters:
        config = peft.LoraConfig(r=4, target_modules=targets)
        peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
    for layer in model.modules():
        if hasattr(layer, "set_adapter"):
            layer.set_adapter(list(adapters))
    found = said(model, arguments())
    assert (found.forward, found.backward) == pytest.approx(counted(model, arguments()), rel=1e-12)
    whole = said(dit(), arguments())
    assert found.backward < whole.backward and found.forward > whole.forward


def test_what_is_recomputed_is_the_forward_of_those_modules_once_more():
    plain, model = counted(dit(), arguments()), dit()
    for index in (0, 1):
        recompute(model.blocks[index], use_reentrant=False)
    forward, backward = counted(model, arguments())
    found = said(model, arguments(), "blocks.0", "blocks.1")
    assert (found.forward, found.backward) == plain == (forward, backward - found.recomputed)
    assert 0 < found.recomputed < found.forward
    assert said(model, arguments(), "").recomputed == found.forward
    assert said(model, arguments(), "blocks.1").recomputed == found.recomputed / 2


def test_a_predictor_within_another_declares_its_products_by_its_place_there():
    alone, holder = dit(), nn.ModuleDict({"high": dit()})
    products = [product.below("high") for product in alone.module_flops((2, 4, 3, 8, 10), (2,), (2, 7, 24))]
    assert step_flops(holder, products, ["high.blocks.1"]) == said(alone, arguments(), "blocks.1")


@pytest.mark.parametrize("kind", [None, "LoraConfig", "LoKrConfig"])
def test_products_that_nothing_declares_are_counted_without_numbers(kind):
    model, mask = dit(), torch.ones(2, 7, dtype=torch.bool, device="meta")
    if kind is not None:
        peft = pytest.importorskip("peft")
        config = getattr(peft, kind)(r=4, target_modules=["to_q", "ffn.net.2"])
        peft.inject_adapter_in_model(config, model.requires_grad_(False), "one", low_cpu_mem_usage=True)
    found = counted_flops(model, {**arguments(), "text_mask": mask}, ["blocks.1"])
    assert found is not None and (found.forward, found.backward) == counted(model, arguments())
    assert 0 < found.recomputed < found.forward / 3


def test_a_forward_that_needs_numbers_has_no_count():
    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.sum().item()

    with torch.device("meta"):
        assert counted_flops(Reading(2, 2), {"input": torch.empty(1, 2)}) is None


def test_products_are_declared_by_hand():
    """Two layers in a row, then attention among the outputs of both: 2*rows*in*out, and 2*queries*keys*width
    each for scores and values."""
    model = nn.ModuleDict({"one": nn.Linear(3, 6), "two": nn.Linear(6, 6), "three": nn.ModuleDict()})
    model["three"]["q"], model["three"]["k"] = nn.Linear(6, 6), nn.Linear(6, 6)
    products = [linear_flops("one", 4, 3, 6), linear_flops("two", 4, 6, 6)]
    assert step_flops(model, products) == StepFlops(144 + 288, 144 + 2 * 288)
    assert step_flops(model, products, ["two"]) * 2 == StepFlops(864, 1440, 576)
    apart = [linear_flops("one", 4, 3, 6), linear_flops("two", 4, 6, 6, after=())]
    assert step_flops(model, apart).backward == 144 + 288
    scores, values = attention_flops("three", (2, 4, 5, 6), ("q",), ("k",), ("k",))
    assert scores.flops == values.flops == 2 * 2 * 4 * 5 * 6
    for frozen, times in (((), 4), (("q",), 3), (("k",), 2), (("q", "k"), 0)):
        model.requires_grad_(True)
        for name in frozen:
            model["three"][name].requires_grad_(False)
        found = step_flops(model, [scores, values])
        assert found == StepFlops(2 * scores.flops, times * scores.flops)
