"""CustomDiT: equal to Diffusers' Wan, true to the contract, and the sizes of the tutorial."""

import dataclasses

import pytest
import torch
from diffusers import WanTransformer3DModel
from mm_custom_dit.config import CustomDiTConfig
from mm_custom_dit.model import CustomDiT

from mm_core.errors import ContractError
from mm_core.testing import PREDICTOR_CHECKS, PredictorProbe, check_predictor

SHARED = {
    "num_layers": 2,
    "in_channels": 4,
    "out_channels": 6,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 40,
    "rope_max_seq_len": 32,
}
TINY = {**SHARED, "num_heads": 2, "head_dim": 12}


def wan_pair(**fields) -> tuple[WanTransformer3DModel, CustomDiT]:
    """Diffusers' model and ours with the same random weights."""
    torch.manual_seed(0)
    theirs = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, **SHARED | fields).eval()
    weights = {name: torch.randn_like(w) * 0.2 for name, w in theirs.state_dict().items()}
    theirs.load_state_dict(weights)
    # Wan embeds patches by a convolution; ours is the same sum as a matrix product.
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"].flatten(1)
    ours = CustomDiT(**TINY | fields)
    ours.load_state_dict(weights)
    return theirs, ours.eval()


def inputs(patch=(1, 2, 2), length=5) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    sizes = [p * n for p, n in zip(patch, (2, 3, 2), strict=True)]
    return {
        "latents": torch.randn(2, 4, *sizes),
        "timestep": torch.tensor([998.7, 12.5]),
        "text": torch.randn(2, length, 10),
        "text_mask": torch.ones(2, length, dtype=torch.bool),
    }


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 2), (1, 1, 1)])
@pytest.mark.parametrize("norm", [True, False])
def test_with_equal_weights_it_computes_what_diffusers_wan_computes(patch, norm):
    theirs, ours = wan_pair(patch_size=patch, cross_attn_norm=norm)
    given = inputs(patch)
    with torch.no_grad():
        expected = theirs(given["latents"], given["timestep"], given["text"]).sample
        torch.testing.assert_close(ours(**given), expected, rtol=1e-5, atol=1e-5)


def test_a_timestep_for_each_token_equals_diffusers_wan_too():
    theirs, ours = wan_pair()
    given = inputs() | {"timestep": torch.rand(2, 12) * 1000}
    with torch.no_grad():
        expected = theirs(given["latents"], given["timestep"], given["text"]).sample
        torch.testing.assert_close(ours(**given), expected, rtol=1e-5, atol=1e-5)


def test_its_gradients_equal_those_of_diffusers_wan():
    theirs, ours = wan_pair()
    given = inputs()
    theirs(given["latents"], given["timestep"], given["text"]).sample.square().mean().backward()
    ours(**given).square().mean().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    expected["patch_embedding.weight"] = expected["patch_embedding.weight"].flatten(1)
    for name, parameter in ours.named_parameters():
        scale = expected[name].abs().max()
        torch.testing.assert_close(parameter.grad / scale, expected[name] / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("check", PREDICTOR_CHECKS.values(), ids=PREDICTOR_CHECKS.keys())
def test_it_keeps_the_contract(check):
    check(PredictorProbe(lambda: CustomDiT(**TINY)))


def test_it_keeps_the_contract_when_built_by_name():
    check_predictor({"type": "custom_dit", **TINY, "patch_size": [2, 1, 2]})


def test_padding_changes_nothing_to_six_digits():
    _, ours = wan_pair()
    given = inputs(length=5)
    given["text_mask"][1, 2:] = False
    garbage = given["text"].clone()
    garbage[1, 2:] = float("nan")
    padded = torch.nn.functional.pad(garbage, (0, 0, 0, 40), value=1e4)
    mask = torch.nn.functional.pad(given["text_mask"], (0, 40))
    with torch.no_grad():
        expected = ours(**given)
        torch.testing.assert_close(ours(**given | {"text": garbage}), expected, rtol=0, atol=1e-6)
        long = ours(**given | {"text": padded, "text_mask": mask})
    torch.testing.assert_close(long, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_a_caption_without_a_token_gives_the_same_at_any_length():
    _, ours = wan_pair()
    given = inputs()
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    with torch.no_grad():
        short = ours(**given | {"text": given["text"][:, :1], "text_mask": nothing[:, :1]})
        long = ours(**given | {"text_mask": nothing})
    assert short.isfinite().all()
    torch.testing.assert_close(short, long, rtol=0, atol=1e-6 * float(short.abs().max()))


def test_rotary_tables_are_filled_with_diffusers_values():
    with torch.device("meta"):
        model = CustomDiT(**TINY)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.rope.freqs_cos.fill_(float("nan"))
        model.init_weights()
    expected = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, **SHARED).rope
    assert torch.equal(model.rope.freqs_cos, expected.freqs_cos)
    assert torch.equal(model.rope.freqs_sin, expected.freqs_sin)


def test_bf16_predictions_stay_near_float32():
    _, ours = wan_pair()
    given = inputs()
    with torch.no_grad():
        expected = ours(**given)
        low = {name: given[name].bfloat16() for name in ("latents", "text")}
        found = ours.bfloat16()(**given | low)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 0.03


def test_a_clip_beyond_the_rotary_tables_is_a_readable_error():
    model = CustomDiT(**TINY | {"rope_max_seq_len": 2})
    with pytest.raises(ContractError, match="2 x 3 x 2 tokens exceeds the rotary tables, which have 2"):
        model(**inputs())


def test_latents_that_do_not_divide_are_a_readable_error():
    given = inputs()
    with pytest.raises(ContractError, match=r"\(2, 5, 4\) do not divide into patches of \(1, 2, 2\)"):
        CustomDiT(**TINY)(**given | {"latents": given["latents"][:, :, :, :5]})


def test_a_head_too_small_for_three_axes_is_a_readable_error():
    with pytest.raises(ContractError, match="head_dim 5"):
        CustomDiT(**TINY | {"head_dim": 5})


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        # 40 blocks of 4 (5120^2) x 2 attentions + 2 x 5120 x 13824, embedders: Wan 2.1 14B has 14.29B
        ({}, 14_288_491_584),
        # 30 layers, 12 heads, FFN 8960: Wan 2.1 1.3B has 1.42B
        ({"num_layers": 30, "num_heads": 12, "ffn_dim": 8960}, 1_418_996_800),
    ],
)
def test_the_tutorials_sizes_have_the_parameters_of_wan(fields, count):
    with torch.device("meta"):
        model = CustomDiT(**fields)
        wan = WanTransformer3DModel(
            num_layers=model_fields(fields)["num_layers"],
            num_attention_heads=model_fields(fields)["num_heads"],
            ffn_dim=model_fields(fields)["ffn_dim"],
        )
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in wan.parameters()) == count


def model_fields(fields: dict) -> dict:
    return dataclasses.asdict(CustomDiTConfig(**fields))


def test_class_defaults_are_the_configs():
    with torch.device("meta"):
        model = CustomDiT()
    config = CustomDiTConfig()
    assert len(model.blocks) == config.num_layers == 40
    assert model.patch_embedding.out_features == config.num_heads * config.head_dim == 5120
    assert model.blocks[0].ffn.net[2].in_features == config.ffn_dim == 13824
    assert model.text_dim == config.text_dim == 4096 and model.patch_size == config.patch_size == (1, 2, 2)


def test_only_absolute_positions_distinguish_places_of_equal_content():
    """Rotary positions are relative: over equal tokens, every place gets the same output."""
    _, rotary = wan_pair()
    absolute = CustomDiT(**TINY, absolute_positions=True)
    absolute.load_state_dict(rotary.state_dict())
    given = inputs() | {"latents": torch.full((2, 4, 2, 6, 4), 0.7)}
    spread = {}
    for name, model in (("rotary", rotary), ("absolute", absolute.eval())):
        with torch.no_grad():
            patches = model(**given).unfold(3, 2, 2).unfold(4, 2, 2)
        spread[name] = (patches - patches[:, :, :1, :1, :1]).abs().max().item()
    assert spread["rotary"] < 1e-5 < 0.1 < spread["absolute"]


def test_with_absolute_positions_it_keeps_the_contract():
    check_predictor(lambda: CustomDiT(**TINY, absolute_positions=True))
