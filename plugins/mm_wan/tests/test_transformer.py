"""wan/transformer: bit-equal to Diffusers' class, true to the contract, and the same over ranks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from diffusers import WanTransformer3DModel
from mm_wan.predictor.config import PresetName
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.presets import DEFAULTS, PRESETS
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from wan_variants import DISTINCT, TINY, forward_flops, inputs, published, theirs, tiny

import mm_core
from mm_core.contracts import Predictor, Randomness, SupportsModuleFlops, SupportsWeightsFrom, WeightsFrom
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_core.modules.flops import step_flops
from mm_core.runtime.process_group import process_group
from mm_core.testing import PREDICTOR_CHECKS, PredictorProbe, check_predictor
from support.ranks import run_ranks

HERE = Path(__file__).parent


def pair(variant: str, **fields) -> tuple[WanTransformer3DModel, WanTransformer]:
    """Diffusers' model and ours with the same weights."""
    model = published(variant, **fields)
    ours = WanTransformer(**tiny(variant, **fields))
    ours.load_state_dict(model.state_dict())
    return model, ours.eval()


# -- the forward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", DISTINCT)
def test_every_variant_computes_the_bits_of_diffusers_class(variant):
    model, ours = pair(variant)
    given = inputs(variant)
    with torch.no_grad():
        found = ours(**given)
        assert torch.equal(found, theirs(model, given))
    assert found.shape == given["latents"].shape and not found._is_view()


@pytest.mark.parametrize("patch", [(2, 2, 2), (1, 1, 1), (1, 2, 4)])
def test_other_patches_do_too(patch):
    model, ours = pair("wan2.1-t2v-14b", patch_size=patch)
    given = inputs("wan2.1-t2v-14b", patch)
    with torch.no_grad():
        assert torch.equal(ours(**given), theirs(model, given))


def test_a_timestep_for_each_token_does_too():
    model, ours = pair("wan2.2-ti2v-5b")
    given = inputs("wan2.2-ti2v-5b") | {"timestep": torch.rand(2, 12) * 1000}
    with torch.no_grad():
        assert torch.equal(ours(**given), theirs(model, given))
        even = given | {"timestep": torch.full((2, 12), 412.3)}
        one = given | {"timestep": torch.full((2,), 412.3)}
        torch.testing.assert_close(ours(**even), ours(**one), rtol=1e-4, atol=1e-4)


def test_its_gradients_are_those_bits():
    model, ours = pair("wan2.1-t2v-1.3b")
    given = inputs("wan2.1-t2v-1.3b")
    theirs(model, given).square().mean().backward()
    ours(**given).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_bf16_computes_those_bits_and_keeps_the_dtype():
    model, ours = pair("wan2.1-t2v-1.3b")
    given = inputs("wan2.1-t2v-1.3b")
    given |= {name: given[name].bfloat16() for name in ("latents", "text")}
    with torch.no_grad():
        found = ours.bfloat16()(**given)
        assert found.dtype == torch.bfloat16 and torch.equal(found, theirs(model.bfloat16(), given))


def test_the_mask_is_ignored_as_in_the_pipeline():
    _, ours = pair("wan2.1-t2v-1.3b")
    given = inputs("wan2.1-t2v-1.3b")
    with torch.no_grad():
        other = ours(**given | {"text_mask": torch.ones_like(given["text_mask"])})
        assert torch.equal(ours(**given), other)


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", PREDICTOR_CHECKS.values(), ids=PREDICTOR_CHECKS.keys())
def test_it_keeps_the_contract(check):
    check(PredictorProbe(lambda: WanTransformer(**TINY)))


@pytest.mark.parametrize("name", ["wan/transformer", "wandit"])
def test_it_is_built_by_its_names(name):
    check_predictor({"type": name, **TINY, "patch_size": [2, 1, 2]})
    model = mm_core.build("predictor", {"type": name, **TINY})
    assert isinstance(model, Predictor) and isinstance(model, SupportsWeightsFrom)
    assert model.weights_from is None
    assert model.text_padding == ("fixed", 512)
    assert (model.in_channels, model.out_channels, model.text_dim) == (4, 4, 16)
    assert model._no_split_modules == ["WanTransformerBlock"]


@pytest.mark.parametrize("variant", DISTINCT)
def test_init_weights_fills_everything_as_wan_does(variant):
    with torch.device("meta"):
        ours = WanTransformer(**tiny(variant, num_attention_heads=8, ffn_dim=256, text_dim=64, freq_dim=64))
    ours.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*ours.parameters(), *ours.buffers()]:
            tensor.fill_(float("nan"))
        torch.manual_seed(0)
        ours.init_weights()
    assert all(tensor.isfinite().all() for tensor in [*ours.parameters(), *ours.buffers()])
    expected = WanTransformer3DModel(**tiny(variant)).rope
    assert torch.equal(ours.rope.freqs_cos, expected.freqs_cos)
    assert torch.equal(ours.rope.freqs_sin, expected.freqs_sin)
    assert not ours.proj_out.weight.any()
    query = ours.blocks[0].attn1.to_q.weight  # Xavier: uniform within sqrt(6 / (in + out))
    assert query.abs().max() <= (6 / 192) ** 0.5 and query.std().item() == pytest.approx(
        (2 / 192) ** 0.5, rel=0.03
    )
    patches = ours.patch_embedding.weight  # of the matrix that it is
    fan = patches.shape[0] + patches[0].numel()
    assert patches.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.1)
    assert ours.condition_embedder.text_embedder.linear_2.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert ours.condition_embedder.time_embedder.linear_1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert ours.blocks[1].scale_shift_table.std().item() == pytest.approx(96**-0.5, rel=0.15)


def test_a_condition_that_is_needed_or_not_known_is_a_readable_error():
    given = inputs("wan2.1-i2v-14b-480p")
    model = WanTransformer(**tiny("wan2.1-i2v-14b-480p"))
    accepted = r"\n  accepted: image_latents \[B,5,T,H,W\], image_embeds \[B,K,10\]"
    for name in ("image_latents", "image_embeds"):
        rest = {key: tensor for key, tensor in given.items() if key != name}
        with pytest.raises(
            ContractError, match=f"the condition '{name}', which this model needs, is missing{accepted}"
        ):
            model(**rest)
    with pytest.raises(
        ContractError, match=r"takes no condition 'image_latent'(.|\n)*did you mean 'image_la"
    ):
        model(**given, image_latent=given["image_latents"])
    plain = WanTransformer(**TINY)
    with pytest.raises(ContractError, match="takes no condition 'image_embeds'\n  accepted: none"):
        plain(**inputs("wan2.1-t2v-14b"), image_embeds=given["image_embeds"])


def test_inputs_that_do_not_fit_are_a_readable_error():
    model = WanTransformer(**TINY)
    given = inputs("wan2.1-t2v-14b")
    with pytest.raises(ContractError, match=r"\(2, 5, 4\) do not divide into patches of \(1, 2, 2\)"):
        model(**given | {"latents": given["latents"][:, :, :, :5]})
    with pytest.raises(
        ContractError, match="the text has 7 tokens\n  accepted: 512 tokens, padded with zeros"
    ):
        model(**given | {"text": given["text"][:, :7]})
    with pytest.raises(ContractError, match=r"each sample has 11 timesteps but 12 tokens"):
        model(**given | {"timestep": torch.zeros(2, 11)})
    with pytest.raises(ContractError, match="2 x 3 x 2 tokens exceeds the rotary tables, which have 2 pos"):
        WanTransformer(**TINY | {"rope_max_seq_len": 2})(**given)
    with pytest.raises(ContractError, match="attention_head_dim 5 cannot hold rotary positions"):
        WanTransformer(**TINY | {"attention_head_dim": 5})


# -- which architecture ----------------------------------------------------------------------------


def test_defaults_are_those_of_diffusers_class():
    signature = inspect.signature(WanTransformer3DModel.__init__).parameters
    assert {name: p.default for name, p in signature.items() if name != "self"} == dict(DEFAULTS)


def test_every_preset_is_a_name_of_the_config():
    assert get_args(PresetName) == tuple(PRESETS)


def folder_of(tmp_path: Path, variant: str = "wan2.1-t2v-1.3b", **fields) -> Path:
    published(variant, **fields).save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def test_a_folder_declares_the_architecture_and_holds_the_weights(tmp_path):
    folder = folder_of(tmp_path, "wan2.2-ti2v-5b", eps=1e-5, patch_size=(1, 2, 4))
    with torch.device("meta"):
        ours = WanTransformer(from_pretrained=str(folder), num_layers=2)
    assert ours.weights_from == WeightsFrom(str(folder), "wan/diffusers")
    assert ours.architecture.eps == 1e-5 and ours.patch_size == (1, 2, 4) and ours.in_channels == 12
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]})
    )
    with torch.device("meta"):
        whole = WanTransformer(from_pretrained=str(tmp_path))
    assert whole.architecture == ours.architecture and whole.weights_from.path == str(tmp_path)


def test_options_that_contradict_the_folder_are_a_readable_error(tmp_path):
    folder = folder_of(tmp_path)
    with pytest.raises(
        ConfigError, match=r"these options contradict .*transformer: num_layers 3 instead of 2, eps 0.1 inst"
    ):
        WanTransformer(from_pretrained=str(folder), num_layers=3, eps=0.1, text_dim=16)
    with pytest.raises(ConfigError, match=r"contradict preset wan2.1-t2v-1.3b: num_layers 2 instead of 30"):
        WanTransformer(preset="wan2.1-t2v-1.3b", num_layers=2)
    with pytest.raises(ConfigError, match=r"no preset is named 'wan2.1-t2v-1b'(.|\n)*did you mean '"):
        WanTransformer(preset="wan2.1-t2v-1b")


def test_a_folder_of_another_variant_than_the_presets_is_a_readable_error(tmp_path):
    config = {"_class_name": "WanTransformer3DModel", **PRESETS["wan2.1-i2v-14b-480p"].architecture.fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"the preset is wan2.1-t2v-14b, but this folder holds wan2.1-i2v-14b-480p or wan2.1-i2v-14b"
        r"-720p: in_channels 36 instead of 16, image_dim 1280 instead of None, added_kv_proj_dim 5120",
    ):
        WanTransformer(from_pretrained=str(tmp_path), preset="wan2.1-t2v-14b")
    with torch.device("meta"):
        WanTransformer(from_pretrained=str(tmp_path), preset="wan2.1-i2v-14b-720p", in_channels=36)


def test_a_preset_serves_until_the_folder_is_there(tmp_path):
    with torch.device("meta"):
        model = WanTransformer(from_pretrained=str(tmp_path / "later"), preset="wan2.1-t2v-1.3b")
    assert model.weights_from.path == str(tmp_path / "later") and len(model.blocks) == 30
    with pytest.raises(
        CheckpointError, match=r"later: this folder does not exist\n  accepted: the folder of a Wa"
    ):
        WanTransformer(from_pretrained=str(tmp_path / "later"))


def test_what_is_no_wan_folder_is_a_readable_error(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"this folder holds no Wan transformer: config.json is missing"
    ):
        WanTransformer(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    with pytest.raises(
        CheckpointError, match=r"no Wan transformer: config.json names the class AutoencoderKLWan"
    ):
        WanTransformer(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"no Wan transformer: config.json names no class"):
        WanTransformer(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel", "vace_layers": [0]}')
    with pytest.raises(
        CheckpointError, match="has settings that WanTransformer3DModel does not have: vace_la"
    ):
        WanTransformer(from_pretrained=str(tmp_path))
    for value in ('"two"', "0", "true"):
        config = f'{{"_class_name": "WanTransformer3DModel", "num_layers": {value}}}'
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(
            CheckpointError,
            match=r"config.json: num_layers is (.|\n)*a whole number from 1 to 1000, such as 40",
        ):
            WanTransformer(from_pretrained=str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "transformer": ["a", "b"]}')
    with pytest.raises(CheckpointError, match=r"this pipeline \(FluxPipeline\) has no Wan transformer"):
        WanTransformer(from_pretrained=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"config.json: this is a file, not a folder"):
        WanTransformer(from_pretrained=str(tmp_path / "config.json"))


# -- operations ------------------------------------------------------------------------------------


def counted(model: WanTransformer3DModel, latents, text: int, image: int, each: bool) -> tuple[int, int]:
    """What torch counts of a forward of Diffusers' class and of its backward, on the meta device, attention
    as matrix products."""
    config = model.config
    batch, _, *sizes = latents
    tokens = torch.Size(s // p for s, p in zip(sizes, config.patch_size, strict=True)).numel()
    with torch.device("meta"):
        given = {
            "hidden_states": torch.empty(batch, config.in_channels, *sizes),
            "timestep": torch.empty(batch, tokens) if each else torch.empty(batch),
            "encoder_hidden_states": torch.empty(batch, text, config.text_dim),
        }
        if image:
            pairs = 2 if config.pos_embed_seq_len else 1  # its pipeline gives two frames as rows of their own
            given["encoder_hidden_states_image"] = torch.empty(
                batch * pairs, image // pairs, config.image_dim
            )
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        (predicted,) = model(**given, return_dict=False)
        forward = counter.get_total_flops()
        predicted.sum().backward()
    return forward, counter.get_total_flops() - forward


def shapes(model: WanTransformer, latents, text: int, image: int, each: bool) -> dict[str, tuple[int, ...]]:
    tokens = torch.Size(s // p for s, p in zip(latents[2:], model.patch_size, strict=True)).numel()
    given = {
        "latents": latents,
        "timestep": (latents[0], tokens) if each else (latents[0],),
        "text": (latents[0], text, model.text_dim),
    }
    return {**given, **({"image_embeds": (latents[0], image, model.image_dim)} if image else {})}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "latents", "text", "image", "each"),
    [
        ("wan2.1-t2v-1.3b", (1, 16, 21, 60, 104), 512, 0, False),  # 81 frames of 480 x 832
        ("wan2.1-t2v-1.3b", (2, 16, 5, 32, 32), 64, 0, False),
        ("wan2.1-t2v-1.3b", (3, 16, 1, 90, 160), 512, 0, False),  # images of 720 x 1280
        ("wan2.1-t2v-14b", (1, 16, 13, 60, 104), 512, 0, False),
        ("wan2.1-i2v-14b-480p", (1, 16, 5, 60, 104), 512, 257, False),
        ("wan2.1-flf2v-14b-720p", (1, 16, 5, 60, 104), 512, 514, False),
        ("wan2.2-i2v-a14b", (1, 16, 5, 60, 104), 512, 0, False),
        ("wan2.2-ti2v-5b", (1, 48, 9, 44, 80), 512, 0, True),
    ],
)
def test_operations_are_those_that_torch_counts(preset, latents, text, image, each):
    """The bar is a hundredth; they are equal."""
    with torch.device("meta"):
        model = WanTransformer(preset=preset)
        reference = WanTransformer3DModel(**PRESETS[preset].architecture.fields)
    forward, backward = counted(reference, latents, text, image, each)
    assert isinstance(model, SupportsModuleFlops)
    step = step_flops(model, model.module_flops(**shapes(model, latents, text, image, each)))
    assert (step.forward, step.backward) == (forward, backward)
    assert forward_flops(model.architecture, latents, text, image, each) == forward
    assert forward_flops(model.architecture, latents[1:], text, image, each) * latents[0] == forward


def test_five_seconds_of_480p_cost_what_was_reckoned_by_hand():
    """N = 21*30*52 = 32760 tokens of width M = 1536 in 30 blocks: attention alone 30*4*N^2*M = 1.98e14."""
    with torch.device("meta"):
        model = WanTransformer(preset="wan2.1-t2v-1.3b")
    assert forward_flops(model.architecture, (16, 21, 60, 104)) == pytest.approx(2.83e14, rel=0.01)


# -- over ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p"])
def test_two_ranks_train_the_weights_of_one(tmp_path, variant):
    """Sharded from meta, begun from a folder, blocks recomputed; tables and all else as on one rank."""
    folder = folder_of(tmp_path, variant)
    seen = {}
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        run_ranks(HERE / "wan_ranks.py", world, out, folder, variant)
        seen[world] = torch.load(out)
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    for world in (1, 2):
        assert seen[world]["wrapped"] == ["predictor.blocks.0", "predictor.blocks.1"]
        assert {f"predictor.{name}" for name in stored} == seen[world]["begun"].keys()
        for name, tensor in stored.items():
            assert torch.equal(seen[world]["begun"][f"predictor.{name}"], tensor), name
        assert torch.equal(seen[world]["rotary"], published(variant).rope.freqs_cos)
    for part in ("gradients", "trained"):
        for name, one in seen[1][part].items():
            gap = (seen[2][part][name] - one).abs().max() / one.abs().max().clamp_min(1e-8)
            assert gap < 1e-5, (part, name)
    moved = [n for n, t in seen[2]["trained"].items() if not torch.equal(t, seen[2]["begun"][n])]
    assert len(moved) == len(stored)
    assert seen[2]["losses"] == pytest.approx(seen[1]["losses"], rel=1e-5)
    assert len(set(seen[1]["losses"])) == 3


def test_it_casts_its_inputs_itself_where_the_engine_does_not():
    """`cast_forward_inputs: false`, with conditions: the same bits, and the output in the dtype given."""
    found = []
    for cast in (True, False):
        with torch.device("meta"):
            task = torch.nn.Module()
            task.predictor = WanTransformer(**tiny("wan2.1-flf2v-14b-720p"))
            task.trainable, task.frozen = ("predictor",), ()
        engine = FSDP2Engine(param_dtype="bf16", cast_forward_inputs=cast)
        with process_group():
            engine.prepare(task, engine.plan(task, 1, 2), None, Randomness(0))
            given = inputs("wan2.1-flf2v-14b-720p")
            assert {t.dtype for t in given.values()} == {torch.float32, torch.bool}
            with engine.evaluating():
                found.append(task.predictor(**given))
    assert found[1].dtype == torch.float32 and torch.equal(found[0].float(), found[1])
