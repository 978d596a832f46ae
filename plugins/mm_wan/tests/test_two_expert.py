"""wan/two_expert: Wan 2.2 A14B's two transformers as one predictor, as its pipelines sample with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import expert_runs as runs
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from mm_wan.predictor.config import Train, TwoExpertPresetName
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.predictor.two_expert import TwoExpert
from mm_wan.presets import PRESETS
from mm_wan.schedulers.flow_match import WanFlowMatch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from wan_variants import TINY, forward_flops, inputs

import mm_core
from mm_core.config.load import load_config
from mm_core.contracts import (
    Predictor,
    Randomness,
    SampleRequest,
    SupportsExperts,
    SupportsFrames,
    SupportsModuleFlops,
    SupportsWeightsFrom,
    WeightsFrom,
)
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_core.modules.flops import step_flops
from mm_core.testing import PREDICTOR_CHECKS, PredictorProbe, check_predictor

PROMPTS = ("a red circle moves left", "a cat and a dog bake a cake")
NEGATIVE = "blurred details"
SIZES = {"num_frames": 5, "height": 32, "width": 48}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return runs.pair_at(tmp_path_factory.mktemp("pair") / "t2v")


@pytest.fixture(scope="module")
def image_pair(tmp_path_factory) -> Path:
    return runs.pair_at(tmp_path_factory.mktemp("pair") / "i2v", "i2v_high_low")


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", PREDICTOR_CHECKS.values(), ids=PREDICTOR_CHECKS.keys())
def test_it_keeps_the_contract(check):
    check(PredictorProbe(lambda: TwoExpert(**TINY)))


def test_it_is_built_by_its_name():
    check_predictor({"type": "wan/two_expert", **TINY})
    model = mm_core.build("predictor", {"type": "wan/two_expert", **TINY})
    for contract in (Predictor, SupportsExperts, SupportsWeightsFrom, SupportsFrames, SupportsModuleFlops):
        assert isinstance(model, contract), contract
    assert [(e.name, e.low, e.high, e.trained) for e in model.experts] == [
        ("high", 875.0, None, True),
        ("low", 0.0, 875.0, True),
    ]
    assert [name for name, _ in model.named_children()] == ["high", "low"] and model.weights_from is None
    assert (model.in_channels, model.out_channels, model.text_dim) == (4, 4, 16)


def test_rows_go_to_the_expert_of_their_timestep():
    torch.manual_seed(0)
    model = TwoExpert(**TINY).eval()
    for seed, expert in enumerate(model.children()):
        runs.shake(expert, seed)
    given = inputs("wan2.2-t2v-a14b") | {"timestep": torch.tensor([874.999, 875.0])}
    row = [{key: tensor[i : i + 1] for key, tensor in given.items()} for i in range(2)]
    with torch.no_grad():
        found = model(**given)
        torch.testing.assert_close(found[:1], model.low(**row[0]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1:], model.high(**row[1]), rtol=1e-5, atol=1e-5)
        # Told which one, it asks no timestep.
        assert torch.equal(model(**given, expert="high"), model.high(**given))
        assert not torch.allclose(model(**given, expert="low"), model(**given, expert="high"), atol=0.1)


def test_presets_are_the_published_pairs():
    pairs = tuple(name for name, preset in PRESETS.items() if preset.boundary is not None)
    assert get_args(TwoExpertPresetName) == pairs and get_args(Train) == ("both", "high", "low")
    with torch.device("meta"):
        video, image = (TwoExpert(preset=name) for name in pairs)
    assert (video.boundary, video.in_channels, image.boundary, image.in_channels) == (0.875, 16, 0.9, 16)
    assert image.needed_conditions == {"image_latents": "[B,20,T,H,W]"}
    assert sum(p.numel() for p in video.parameters()) == 2 * 14_288_491_584


@pytest.mark.parametrize("train", ["high", "low"])
def test_the_idle_expert_is_not_built(pair, train):
    model = TwoExpert(from_pretrained=str(pair), train=train)
    assert [name for name, _ in model.named_children()] == [train]
    assert model.weights_from == WeightsFrom(str(pair), "wan/diffusers")
    alone = WanTransformer3DModel.from_pretrained(pair / runs.PARTS[train])
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in alone.parameters())
    idle = "low" if train == "high" else "high"
    latents = torch.zeros(1, 16, 1, 2, 2)
    text = torch.zeros(1, 512, 32), torch.ones(1, 512, dtype=torch.bool)
    for which in ({"expert": idle}, {}):
        timestep = torch.tensor([1.0 if idle == "low" else 999.0])
        with pytest.raises(
            ContractError, match=f"the expert '{idle}' is not trained by this run, and its weights are not"
        ):
            model(latents, timestep, *text, **which)
    with model.complete(torch.device("cpu")), torch.no_grad():
        found = model(latents.bfloat16(), timestep, text[0].bfloat16(), text[1], expert=idle)
        assert found.dtype == torch.bfloat16
        assert [name for name, _ in model.named_children()] == [train]  # neither trained nor saved
    assert not model._visiting


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "image"), [("wan2.2-t2v-a14b", False), ("wan2.2-i2v-a14b", True)])
def test_operations_are_within_a_hundredth_of_torchs_count(preset, image):
    shape, reference = (1, 16, 5, 60, 104), WanTransformer3DModel
    with torch.device("meta"):
        model, theirs = TwoExpert(preset=preset), reference(**PRESETS[preset].architecture.fields)
        given = {
            "hidden_states": torch.empty(1, 36 if image else 16, *shape[2:]),
            "timestep": torch.empty(1),
            "encoder_hidden_states": torch.empty(1, 512, 4096),
        }
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            theirs(**given)
    reckoned = forward_flops(PRESETS[preset].architecture, shape)
    assert reckoned == pytest.approx(counter.get_total_flops(), rel=0.01)
    for expert in ("high", "low"):
        conditions = {"image_latents": (1, 20, *shape[2:])} if image else {}
        products = model.module_flops(shape, (1,), (1, 512, 4096), expert, **conditions)
        assert sum(product.flops for product in products) == reckoned
        paths = dict(model.named_modules())
        assert all(product.module.startswith(expert) and product.module in paths for product in products)
        lone = model.get_submodule(expert)
        alone = step_flops(lone, lone.module_flops(shape, (1,), (1, 512, 4096), **conditions), ["blocks.0"])
        assert step_flops(model, products, [f"{expert}.blocks.0"]) == alone
        assert alone.backward > 1.9 * alone.forward


# -- sampling as the pipelines do ------------------------------------------------------------------


def theirs_at(folder: Path, solver: str):
    """The pipeline in a folder, with another solver."""
    kind = WanImageToVideoPipeline if (folder.name == "i2v") else WanPipeline
    pipeline = kind.from_pretrained(folder)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    if solver == "euler":
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        cls = UniPCMultistepScheduler if solver == "unipc" else DPMSolverMultistepScheduler
        pipeline.scheduler = cls(**flow)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def clip_of(pipeline, image: Image.Image | None = None, **guidance) -> torch.Tensor:
    """pixels [2,3,F,Y,X] in [-1, 1] from the task's noise."""
    noise = torch.stack([Randomness(3).normal((16, 2, 4, 6), "sample", i) for i in range(2)])
    images = {} if image is None else {"image": [image] * 2}
    clips = [
        pipeline(
            prompt=prompt, negative_prompt=NEGATIVE, **SIZES, num_inference_steps=4, output_type="pt",
            latents=noise[i : i + 1], **{key: value[0] for key, value in images.items()}, **guidance,
        ).frames[0]
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    return torch.stack(clips).transpose(1, 2) * 2 - 1


def ours(task, solver: str, guidance, **more) -> torch.Tensor:
    task.scheduler = WanFlowMatch(solver=solver, sample_shift=3.0)
    request = SampleRequest(PROMPTS, NEGATIVE, seed=3, steps=4, guidance=guidance, fps=8, **SIZES, **more)
    return torch.stack([clip.pixels for clip in task.sample(request)])


@pytest.fixture(scope="module")
def task(pair, tmp_path_factory):
    return runs.imported(tmp_path_factory.mktemp("run"), pair)[2]


GUIDANCE = [
    (1.0, {"guidance_scale": 1.0}),
    (5.0, {"guidance_scale": 5.0}),
    ((4.0, 3.0), {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
    ((4.0, 1.0), {"guidance_scale": 4.0, "guidance_scale_2": 1.0}),
]


@pytest.mark.parametrize(("guidance", "theirs"), GUIDANCE, ids=lambda value: str(value))
@pytest.mark.parametrize("solver", runs.SOLVERS)
def test_text_becomes_the_pipelines_clip(pair, task, solver, guidance, theirs):
    expected = clip_of(theirs_at(pair, solver), **theirs)
    found = ours(task, solver, guidance)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.05 and (expected.abs() < 1).float().mean() > 0.5


def test_a_scale_up_to_1_switches_guidance_off_for_that_expert_alone(task):
    """One forward of the rows instead of two; also below 1, as in the pipeline."""
    rows: list[tuple[str, int]] = []
    hook = task.predictor.register_forward_pre_hook(
        lambda _, args, given: rows.append((given["expert"], len(given["latents"]))), with_kwargs=True
    )
    counts = {}
    for guidance in (3.0, 1.0, 0.5, (1.0, 3.0), (3.0, 0.0)):
        rows.clear()
        ours(task, "euler", guidance)
        counts[guidance] = dict(rows)
        assert len(rows) == 4 and [name for name, _ in rows] == sorted(name for name, _ in rows)
    hook.remove()
    assert counts[3.0] == {"high": 4, "low": 4} and counts[1.0] == counts[0.5] == {"high": 2, "low": 2}
    assert counts[1.0, 3.0] == {"high": 2, "low": 4} and counts[3.0, 0.0] == {"high": 4, "low": 2}


def test_both_experts_and_both_scales_have_a_part_in_a_clip(pair, task):
    plain = ours(task, "unipc", (4.0, 3.0))
    for other in ((4.0, 4.0), (3.0, 3.0), (4.0, 1.0)):
        assert (ours(task, "unipc", other) - plain).abs().max() > 1e-3
    pipeline = theirs_at(pair, "unipc")
    both = clip_of(pipeline, guidance_scale=1.0)
    pipeline.transformer_2 = pipeline.transformer
    assert (clip_of(pipeline, guidance_scale=1.0) - both).abs().max() > 1e-2


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("solver", runs.SOLVERS)
def test_an_image_and_text_become_the_pipelines_clip(image_pair, image_task, solver, guidance):
    picture = Image.effect_mandelbrot((48, 32), (-2, -1.2, 1, 1.2), 40).convert("RGB")
    expected = clip_of(theirs_at(image_pair, solver), picture, guidance_scale=guidance)
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 48, 3)
    shown = pixels.permute(2, 0, 1).contiguous()
    found = ours(image_task, solver, guidance, images=((shown,), (shown,)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.05


@pytest.fixture(scope="module")
def image_task(image_pair, tmp_path_factory):
    return runs.imported(tmp_path_factory.mktemp("run"), image_pair)[2]


@pytest.mark.parametrize("train", ["high", "low"])
def test_a_run_that_trains_one_samples_with_the_others_published_weights(pair, tmp_path, train):
    """Equal to the pipeline with the trained expert in the place of its own."""
    _, _, task = runs.imported(tmp_path, pair, train=train)
    before = clip_of(theirs_at(pair, "unipc"), guidance_scale=3.0)
    torch.testing.assert_close(ours(task, "unipc", 3.0), before, rtol=0, atol=1e-4)
    runs.shake(task.predictor.get_submodule(train), 9, 0.1)
    pipeline = theirs_at(pair, "unipc")
    getattr(pipeline, runs.PARTS[train]).load_state_dict(task.predictor.get_submodule(train).state_dict())
    expected = clip_of(pipeline, guidance_scale=3.0)
    torch.testing.assert_close(ours(task, "unipc", 3.0), expected, rtol=0, atol=1e-4)
    assert (expected - before).abs().max() > 1e-2


def test_a_run_samples_by_its_folders_alone(pair, tmp_path):
    runs.imported(tmp_path, pair, train="low")
    clips = mm_core.sample(tmp_path / "runs/pair", prompt=PROMPTS[0], steps=2, guidance=[4.0, 3.0], seed=3)
    assert clips[0].pixels.shape == (3, 5, 32, 48) and clips[0].pixels.isfinite().all()
    moved = tmp_path / "elsewhere"
    shutil.copytree(pair, moved)
    task = runs.imported(tmp_path, moved, "other", train="low")[2]
    shutil.rmtree(moved / "transformer")
    with pytest.raises(CheckpointError, match=r"elsewhere/transformer: this folder does not exist"):
        # What is asked before the first step of a run that samples while it trains.
        task.check_request(SampleRequest(PROMPTS, fps=8, **SIZES))
    with pytest.raises(CheckpointError, match=r"elsewhere/transformer: this folder does not exist"):
        mm_core.sample(tmp_path / "runs/other", prompt=PROMPTS[0], steps=2)


# -- input that does not fit -----------------------------------------------------------------------


def test_a_guidance_list_of_another_length_is_a_readable_error(pair, task, tmp_path):
    sentence = (
        "guidance lists 3 scales, but the predictor has 2 experts\n  accepted: a number, or one for each "
        "expert: high, then low"
    )
    with pytest.raises(ContractError) as fault:
        ours(task, "unipc", (1.0, 2.0, 3.0))
    assert sentence in str(fault.value)
    config = runs.config_of(tmp_path, pair)
    fitting = mm_core.plan.build_task(config)
    fitting.sample_defaults = mm_core.builtin.configs.text_to_video.SampleConfig(guidance=(1.0, 2.0, 3.0))
    with pytest.raises(ContractError) as fault:
        fitting.check(config.data.train.options)
    assert f"task.sample.guidance: {sentence}" in str(fault.value)


def test_a_boundary_that_contradicts_the_folder_or_preset_is_a_readable_error(pair, tmp_path):
    with pytest.raises(ConfigError, match=r"boundary 0.9 contradicts .*t2v, which has 0.875"):
        TwoExpert(from_pretrained=str(pair), boundary=0.9)
    clash = r"boundary 0.875 contradicts preset wan2.2-i2v-a14b, which has 0.9"
    with torch.device("meta"), pytest.raises(ConfigError, match=clash):
        TwoExpert(preset="wan2.2-i2v-a14b", boundary=0.875)
    assert TwoExpert(**TINY, boundary=0.5).experts[0].low == 500
    with pytest.raises(ConfigError, match=r"predictor.boundary: found 1.5, a number\n  accepted: a number >"):
        mm_core.build("predictor", {"type": "wan/two_expert", **TINY, "boundary": 1.5})
    index = json.loads((pair / "model_index.json").read_text())
    other = shutil.copytree(pair, tmp_path / "odd")
    (other / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": "high"}))
    with pytest.raises(CheckpointError, match=r"boundary_ratio is 'high'\n  accepted: a number between 0 a"):
        TwoExpert(from_pretrained=str(other))


def test_a_folder_without_both_experts_is_a_readable_error(pair, tmp_path):
    accepted = r"\n  accepted: a pipeline's folder \(model_index.json\) with transformer and transformer_2"
    with pytest.raises(CheckpointError, match=f"this folder holds a single transformer{accepted}"):
        TwoExpert(from_pretrained=str(pair / "transformer"), train="high")
    lone = shutil.copytree(pair, tmp_path / "lone")
    index = json.loads((pair / "model_index.json").read_text())
    (lone / "model_index.json").write_text(json.dumps(index | {"transformer_2": [None, None]}))
    with pytest.raises(CheckpointError, match=r"only one expert, transformer(.|\n)*wan/transformer"):
        TwoExpert(from_pretrained=str(lone))
    with pytest.raises(CheckpointError, match="this folder holds no pair of experts"):
        TwoExpert(from_pretrained=str(pair / "vae"))
    torn = shutil.copytree(pair, tmp_path / "torn")
    shutil.rmtree(torn / "transformer_2")
    with pytest.raises(CheckpointError, match="torn/transformer_2: this folder does not exist"):
        TwoExpert(from_pretrained=str(torn), train="high")
    unlike = shutil.copytree(pair, tmp_path / "unlike")
    path = unlike / "transformer_2/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))
    with pytest.raises(CheckpointError, match="experts have different architectures: num_layers 2 and 3"):
        TwoExpert(from_pretrained=str(unlike))


def test_a_lone_transformer_is_not_picked_out_of_two(pair):
    with pytest.raises(CheckpointError, match="this pipeline has 2 transformers") as caught:
        WanTransformer(str(pair))
    assert caught.value.accepted == f"one of them: {pair}/transformer or {pair}/transformer_2"
    assert "wan/two_expert" in caught.value.hint
    with torch.device("meta"):
        assert WanTransformer(str(pair / "transformer_2")).architecture.num_layers == 2


def test_a_preset_of_one_transformer_is_a_readable_error(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'wan2.1-t2v-14b' is not a model with two(.|\n)*wan2.2-t2v-a14b, wan2"
    ):
        TwoExpert(preset="wan2.1-t2v-14b")
    with pytest.raises(ConfigError, match=r"predictor.preset: found 'wan2.2-ti2v-5b'"):
        mm_core.build("predictor", {"type": "wan/two_expert", "preset": "wan2.2-ti2v-5b"})
    with torch.device("meta"):
        model = TwoExpert(from_pretrained=str(tmp_path / "later"), preset="wan2.2-t2v-a14b", train="low")
    assert model.weights_from.path == str(tmp_path / "later") and len(model.low.blocks) == 40


def test_a_scheduler_that_cannot_be_cut_is_a_readable_error(pair, tmp_path):
    config = runs.config_of(tmp_path, pair)
    path = tmp_path / "core.yaml"
    path.write_text((tmp_path / "pair.yaml").read_text().replace("sample_shift: 3.0", "shift: 3.0"))
    path.write_text(path.read_text().replace("wan/flow_match", "core/flow_match"))
    assert config.task.options["scheduler"].type == "wan/flow_match"
    with pytest.raises(ContractError, match=r"2 experts, but a FlowMatch cannot draw the timesteps of one"):
        mm_core.plan.build_task(load_config(path))


def test_clips_of_one_expert_without_files_are_a_readable_error():
    model = TwoExpert(**TINY, train="high")
    sentence = "clips need the expert 'low', which is not trained, and from_pretrained is not set"
    with pytest.raises(CheckpointError, match=sentence), model.complete(torch.device("cpu")):
        pass


def test_weights_that_are_not_the_experts_are_a_readable_error(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(pair, tmp_path / "odd")
    file = other / "transformer_2/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors.pop("proj_out.weight")
    save_file(tensors, file)
    model = TwoExpert(from_pretrained=str(other), train="high")
    with (
        pytest.raises(
            CheckpointError,
            match=r"1 tensor missing, unexpected or with another shape, such as proj_out\.weight",
        ),
        model.complete(torch.device("cpu")),
    ):
        pass


@pytest.mark.parametrize("local", ["", "/weights/wan", "./wan"])
def test_a_folder_an_expert_takes_the_place_of_a_name_on_the_hub_or_a_path(tmp_path, local):
    path, high, low = tmp_path / "run.yaml", tmp_path / "high", tmp_path / "low"
    base = "config:wan/t2v_a14b"
    if local:
        (tmp_path / "base.yaml").write_text(
            f"include: {base}\ntask: {{predictor: {{from_pretrained: {local}}}}}\n", encoding="utf-8"
        )
        base = "base.yaml"
    own = f"task: {{predictor: {{from_pretrained: {{high: {high}, low: {low}}}}}}}\n"
    path.write_text(f"include: {base}\n" + own, encoding="utf-8")
    found = load_config(path).task.options["predictor"].options["from_pretrained"]
    assert (found.high, found.low) == (str(high), str(low))
