"""Sampling against Diffusers: a hand-written WanPipeline loop, and `WanPipeline` itself."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.schedulers.flow_match import WanFlowMatch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from wan_solvers import of_diffusers

import mm_core
from mm_core.contracts import Randomness, SampleRequest
from mm_core.diffusion.encoders.text import HFTextEncoder
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_core.tasks.text_to_video.task import TextToVideo

STEPS = [1, 2, 3, 8, 20]
SOLVERS = ["unipc", "euler", "dpm++"]


def pipeline_loop(scheduler, velocity, latents: Tensor, steps: int) -> Tensor:
    """The denoising loop of WanPipeline.__call__, written down."""
    scheduler.set_timesteps(steps, device=latents.device)
    scheduler.set_begin_index(0)
    for t in scheduler.timesteps:
        latents = scheduler.step(
            velocity(latents, t.expand(latents.shape[0])), t, latents, return_dict=False
        )[0]
    return latents


class Curved:
    """A velocity that bends in latents and time, and remembers what it was asked."""

    def __init__(self) -> None:
        self.timesteps: list[Tensor] = []

    def __call__(self, latents: Tensor, timestep: Tensor) -> Tensor:
        self.timesteps.append(timestep)
        time = (timestep / 1000).reshape(-1, 1, 1, 1, 1)
        return torch.tanh(1.7 * latents) * (0.3 + time**2) + torch.sin(3 * latents.roll(1, dims=1) + 5 * time)


NOISE = Randomness(0).normal((2, 3, 2, 4, 4), "noise")


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_integrating_equals_the_pipelines_loop(solver, steps):
    ours, theirs = Curved(), Curved()
    result = WanFlowMatch(solver=solver, shift=3.0).integrate(ours, NOISE, steps)
    expected = pipeline_loop(of_diffusers(solver, 3.0), theirs, NOISE, steps)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert result.dtype == torch.float32 and result.isfinite().all()
    assert len(ours.timesteps) == steps
    for mine, other in zip(ours.timesteps, theirs.timesteps, strict=True):
        assert mine.dtype == other.dtype == (torch.float32 if solver == "euler" else torch.int64)
        assert torch.equal(mine, other)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver", ["unipc", "dpm++"])
def test_the_order_is_the_solvers(solver, order):
    result = WanFlowMatch(solver=solver, solver_order=order).integrate(Curved(), NOISE, 6)
    expected = pipeline_loop(of_diffusers(solver, solver_order=order), Curved(), NOISE, 6)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    other = pipeline_loop(of_diffusers(solver, solver_order=order % 3 + 1), Curved(), NOISE, 6)
    assert (result - other).abs().max() > 1e-3  # the orders can be told apart


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_sigmas_are_those_that_diffusers_visits(solver, steps):
    scheduler = of_diffusers(solver, 7.0)
    scheduler.set_timesteps(steps)
    sigmas = WanFlowMatch(solver=solver, sample_shift=7.0).sigmas(steps)
    assert torch.equal(sigmas, scheduler.sigmas) and sigmas.shape == (steps + 1,)
    assert sigmas.dtype == torch.float32 and sigmas[0] > 0.99 and sigmas[-1] == 0


def test_sampling_twice_gives_the_same_and_low_precision_velocities_leave_the_latents_alone():
    scheduler = WanFlowMatch(solver="euler")
    assert torch.equal(*(scheduler.integrate(Curved(), NOISE, 3) for _ in range(2)))
    seen = []

    def rough(latents: Tensor, timestep: Tensor) -> Tensor:
        seen.append(latents.dtype)
        return Curved()(latents, timestep).bfloat16()

    assert scheduler.integrate(rough, NOISE.bfloat16(), 3).dtype == torch.float32
    assert seen == [torch.float32] * 3


# -- a pipeline's scheduler folder -----------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_scheduler_folder_is_honoured(tmp_path, solver):
    settings = {} if solver == "euler" else {"solver_order": 3, "final_sigmas_type": "sigma_min"}
    settings |= {"unipc": {"solver_type": "bh1"}, "dpm++": {"solver_type": "heun"}}.get(solver, {})
    of_diffusers(solver, 11.0, **settings).save_pretrained(tmp_path)
    scheduler = WanFlowMatch(from_pretrained=str(tmp_path), shift=5.0)
    steps = 2 if solver == "dpm++" else 6  # DPM-Solver++'s sigma_min is that of another process
    expected = pipeline_loop(of_diffusers(solver, 11.0, **settings), Curved(), NOISE, steps)
    torch.testing.assert_close(scheduler.integrate(Curved(), NOISE, steps), expected, rtol=0, atol=1e-6)
    assert scheduler.missing_files() == []

    own = WanFlowMatch(from_pretrained=str(tmp_path), solver=solver, sample_shift=2.0)
    changed = of_diffusers(solver, 2.0, **settings)
    changed.set_timesteps(steps)
    assert torch.equal(own.sigmas(steps), changed.sigmas)


def test_an_order_that_is_set_wins_over_the_folders(tmp_path):
    of_diffusers("unipc", 3.0, solver_order=3).save_pretrained(tmp_path)
    result = WanFlowMatch(from_pretrained=str(tmp_path), solver_order=1).integrate(Curved(), NOISE, 6)
    expected = pipeline_loop(of_diffusers("unipc", 3.0, solver_order=1), Curved(), NOISE, 6)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_a_folder_that_is_not_there_is_only_missed_when_sampling(tmp_path):
    scheduler = WanFlowMatch(from_pretrained=str(tmp_path))
    assert scheduler.missing_files() == [str(tmp_path / "scheduler_config.json")]
    (tmp_path / "scheduler").mkdir()
    of_diffusers("unipc").save_pretrained(tmp_path / "scheduler")
    with pytest.raises(CheckpointError) as error:
        scheduler.integrate(Curved(), NOISE, 2)
    assert "this folder holds no scheduler_config.json" in str(error.value)
    assert f"did you mean {tmp_path / 'scheduler'}?" in str(error.value)


REFUSED = [
    (DDPMScheduler(), {}, "has class 'DDPMScheduler', which cannot sample Wan"),
    (
        of_diffusers("unipc"),
        {"solver": "euler"},
        "solver is euler, but the folder's scheduler is a UniPCMultistep",
    ),
    (of_diffusers("euler"), {"solver_order": 2}, "solver_order is 2, but the folder's scheduler is Euler's"),
    (
        UniPCMultistepScheduler(),
        {},
        "prediction_type is 'epsilon', which does not work for Wan",
    ),
    (
        of_diffusers("dpm++", algorithm_type="sde-dpmsolver++"),
        {},
        "'sde-dpmsolver++', which adds random noise in each",
    ),
    (
        of_diffusers("euler", stochastic_sampling=True),
        {},
        "stochastic_sampling is True, which does not work for Wan",
    ),
    (
        of_diffusers("unipc", use_dynamic_shifting=True),
        {},
        "use_dynamic_shifting is True, which does not work for Wan",
    ),
    (
        of_diffusers("unipc"),
        {"num_train_timesteps": 500},
        "num_train_timesteps is 500, but the folder's scheduler",
    ),
]


@pytest.mark.parametrize(("saved", "fields", "sentence"), REFUSED)
def test_a_folder_of_another_scheduler_is_refused_before_training(tmp_path, saved, fields, sentence):
    saved.save_pretrained(tmp_path)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        WanFlowMatch(from_pretrained=str(tmp_path), **fields)
    assert sentence in str(error.value) and str(tmp_path / "scheduler_config.json") in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "cannot be read"), (json.dumps([1]), "are not a mapping")]
)
def test_a_damaged_file_is_reported_as_damaged(tmp_path, text, sentence):
    (tmp_path / "scheduler_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"the scheduler's settings {sentence}"):
        WanFlowMatch(from_pretrained=str(tmp_path))


@pytest.mark.parametrize("steps", [0, -1])
def test_sampling_takes_at_least_one_step(steps):
    with pytest.raises(ContractError, match=f"sampling needs at least one step, not {steps}"):
        WanFlowMatch().integrate(Curved(), NOISE, steps)
    with pytest.raises(ContractError, match=f"sampling needs at least one step, not {steps}"):
        WanFlowMatch().sigmas(steps)


# -- the core's task and WanPipeline ---------------------------------------------------------------

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
PROMPTS = ("a red circle moves left", "two boats")
NEGATIVE = "blurred"


class Scaled:
    """Stands for a video autoencoder of stride (4, 8, 8): its pixels begin with the latents, in [-1, 1]."""

    stride, latent_channels = (4, 8, 8), 4

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return (4, 1 + (num_frames - 1) // 4, height // 8, width // 8)

    def decode(self, latents: Tensor) -> Tensor:
        rows, _, frames, height, width = latents.shape
        pixels = torch.zeros(rows, 3, 4 * frames - 3, 8 * height, 8 * width)
        pixels.view(rows, -1)[:, : latents[0].numel()] = latents.reshape(rows, -1) / 64
        return pixels


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A tiny UMT5 with a tokenizer of words, as a folder."""
    folder = tmp_path_factory.mktemp("umt5")
    words = ["<pad>", "</s>", "<unk>", *sorted({w for p in (*PROMPTS, NEGATIVE) for w in p.split()})]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=len(words), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def predictor():
    """A tiny real Wan transformer whose every weight counts."""
    model = WanTransformer(**TINY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def reference(predictor):
    """The same transformer as Diffusers' own class."""
    model = WanTransformer3DModel(**TINY, patch_size=(1, 2, 2)).eval()
    model.load_state_dict(predictor.state_dict())
    return model


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("solver", SOLVERS)
def test_integrating_a_wan_transformer_equals_the_pipelines_loop(predictor, reference, solver, steps):
    noise = Randomness(1).normal((2, 4, 2, 4, 4), "noise")
    text = Randomness(1).normal((2, 512, 16), "text")
    mask = torch.ones(2, 512, dtype=torch.bool)
    with torch.no_grad():
        result = WanFlowMatch(solver=solver).integrate(lambda x, t: predictor(x, t, text, mask), noise, steps)
        expected = pipeline_loop(
            of_diffusers(solver), lambda x, t: reference(x, t, text, return_dict=False)[0], noise, steps
        )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert (result - noise).abs().max() > 0.1


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_cores_task_samples_what_the_pipeline_samples(
    predictor, reference, text_folder, solver, guidance
):
    encoder = HFTextEncoder(str(text_folder), dtype="fp32")
    mm_core.load_frozen(encoder, "cpu")
    task = TextToVideo(predictor, Scaled(), encoder, WanFlowMatch(solver=solver))
    request = SampleRequest(
        PROMPTS, NEGATIVE, seed=3, steps=4, guidance=guidance, num_frames=5, height=32, width=48, fps=8
    )
    pixels = torch.stack([clip.pixels for clip in task.sample(request)])
    clips = pixels.reshape(2, -1)[:, : 4 * 2 * 4 * 6].view(2, 4, 2, 4, 6) * 64

    pipeline = WanPipeline(
        PreTrainedTokenizerFast.from_pretrained(text_folder),
        UMT5EncoderModel.from_pretrained(text_folder).eval(),
        None,
        of_diffusers(solver),
        reference,
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.stack([Randomness(3).normal((4, 2, 4, 6), "sample", i) for i in range(2)])
    expected = pipeline(
        list(PROMPTS),
        [NEGATIVE] * 2,
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=guidance,
        latents=noise,
        output_type="latent",
    ).frames
    assert expected.abs().max() < 64  # the task's clamp cut nothing off
    torch.testing.assert_close(clips, expected, rtol=0, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.1
