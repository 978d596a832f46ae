"""A predictor's own formula of guidance: clips as the pipelines of Z-Image and Qwen-Image sample them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import Expert, PredictorModule, Randomness, SampleRequest
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.task import TextToVideo
from mm_core.testing.predictors.capabilities import guided
from mm_core.testing.predictors.probe import PredictorProbe
from support.text_to_video import SmallPredictor, make_task

STEPS, SIZE = 3, 4
ONE_FRAME = SampleConfig(num_frames=1, height=2 * SIZE, width=2 * SIZE, fps=1.0, steps=STEPS)
PROMPTS, NEGATIVE = ("a red circle", "up"), "blue"


class OfDiffusers(PredictorModule):
    """A model of images of Diffusers, tiny, on 12 channels and text of width 8."""

    patch_size, max_frames, in_channels, text_dim = (1, 2, 2), 1, 12, 8

    def __init__(self) -> None:
        super().__init__()
        self.model = self.made()

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data.copy_(Randomness(3).normal(tuple(parameter.shape), name) * 0.1)


class ZImage(OfDiffusers):
    guidance_off = 0.0

    def made(self) -> nn.Module:
        sizes = {"dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        axes = {"axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16]}
        return ZImageTransformer2DModel(in_channels=12, cap_feat_dim=8, **sizes, **axes)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return conditional + scale * (conditional - unconditional)

    def forward(self, latents, timestep, text, text_mask):
        captions = [row[real] for row, real in zip(text, text_mask, strict=True)]
        found = self.model(list(latents), (1000 - timestep) / 1000, captions, return_dict=False)[0]
        return -torch.stack(found)

    def sampled(self, noise: Tensor, scale: float, texts: list[tuple[Tensor, Tensor]]) -> Tensor:
        real = [[row[kept] for row, kept in zip(*given, strict=True)] for given in texts]
        pipeline = ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), None, None, None, self.model)
        embeds = {"prompt_embeds": real[0], "negative_prompt_embeds": real[1]}
        return _called(pipeline, latents=noise[:, :, 0], guidance_scale=scale, **embeds)


class QwenImage(OfDiffusers):
    guidance_off = 1.0

    def made(self) -> nn.Module:
        sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
        axes = {"joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)}
        return QwenImageTransformer2DModel(in_channels=48, out_channels=12, **sizes, **axes)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        wanted = _tokens(conditional)
        found = _tokens(unconditional + scale * (conditional - unconditional))
        found = found * (wanted.norm(dim=-1, keepdim=True) / found.norm(dim=-1, keepdim=True))
        return _latents(found, conditional)

    def forward(self, latents, timestep, text, text_mask):
        rows = [[(1, latents.shape[3] // 2, latents.shape[4] // 2)]] * len(latents)
        out = self.model(_tokens(latents), text, text_mask, timestep / 1000, rows, return_dict=False)[0]
        return _latents(out, latents)

    def sampled(self, noise: Tensor, scale: float, texts: list[tuple[Tensor, Tensor]]) -> Tensor:
        (text, mask), (negative, its_mask) = texts
        pipeline = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), None, None, None, self.model)
        embeds = {"prompt_embeds": text, "prompt_embeds_mask": mask}
        embeds |= {"negative_prompt_embeds": negative, "negative_prompt_embeds_mask": its_mask}
        found = _called(pipeline, latents=_tokens(noise), true_cfg_scale=scale, **embeds)
        return _latents(found, noise)[:, :, 0]


def _tokens(latents: Tensor) -> Tensor:
    return QwenImagePipeline._pack_latents(latents, len(latents), *latents.shape[1:2], *latents.shape[3:])


def _latents(tokens: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape[3:]
    return QwenImagePipeline._unpack_latents(tokens, 8 * height, 8 * width, 8).clone()


def _called(pipeline, **given) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"height": 8 * SIZE, "width": 8 * SIZE, "num_inference_steps": STEPS}
    return pipeline(**sizes, **given, output_type="latent").images


def as_plain(model: OfDiffusers) -> OfDiffusers:
    """The same model with the usual formula."""

    class Plain(OfDiffusers):
        def made(self) -> nn.Module:
            return model.model

        forward = type(model).forward

    return Plain()


def sampled(task: TextToVideo, scale: float | tuple[float, ...], negative: str = "") -> Tensor:
    clips = task.sample(SampleRequest(PROMPTS, guidance=scale, negative_prompt=negative, seed=3))
    return torch.stack([clip.pixels for clip in clips])


@pytest.mark.parametrize(("family", "scales"), [(ZImage, (0.0, 0.5, 4.0)), (QwenImage, (1.0, 4.0))])
def test_clips_are_those_of_the_familys_pipeline(family, scales):
    task = make_task(family(), sample=ONE_FRAME)
    task.predictor.init_weights()
    encoder = task.text_encoder
    texts = [encoder.encode(*encoder.tokenizer()(list(each))) for each in (PROMPTS, [NEGATIVE] * 2)]
    noise = torch.stack([Randomness(3).normal((12, 1, SIZE, SIZE), "sample", i) for i in range(2)])
    found = {scale: sampled(task, scale, NEGATIVE) for scale in scales}
    for scale, pixels in found.items():
        wanted = task.predictor.sampled(noise, scale, texts)[:, :, None]
        torch.testing.assert_close(pixels, task.autoencoder.decode(wanted).clamp(-1, 1), rtol=1e-4, atol=1e-5)
    usual = make_task(as_plain(task.predictor), sample=ONE_FRAME)
    assert float((sampled(usual, 4.0, NEGATIVE) - found[4.0]).abs().max()) > 0.01


@pytest.mark.parametrize("family", [ZImage, QwenImage])
def test_the_kit_passes_the_formulas_of_both_families(family):
    guided(PredictorProbe(family))


class Recorded(SmallPredictor):
    """The usual formula, moved so that guidance is off at 0; its scales are recorded."""

    guidance_off = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        assert conditional.dtype == unconditional.dtype == torch.float32
        self.scales.append(scale)
        return unconditional + (scale + 1) * (conditional - unconditional)

    @property
    def rows(self) -> list[int]:
        found = [len(call["latents"]) for call in self.calls]
        self.calls.clear()
        return found


def test_the_unconditional_pass_begins_above_the_predictors_own_scale():
    task, usual = make_task(Recorded()), make_task()
    for scale, rows in ((0.0, 2), (0.5, 4), (1.0, 4)):
        assert torch.equal(sampled(task, scale), sampled(usual, scale + 1))
        assert task.predictor.rows == [rows] * STEPS
    assert task.predictor.scales == [0.5] * STEPS + [1.0] * STEPS


def test_each_expert_is_guided_by_its_own_scale():
    class TwoExperts(Recorded):
        experts = (Expert("high", 900.0), Expert("low", 0.0, 900.0))

        def complete(self, device):
            return nullcontext()

        def forward(self, latents, timestep, text, text_mask, expert=None):
            return super().forward(latents, timestep, text, text_mask)

    class Truncated(FlowMatch):
        def truncated(self, low, high):
            return self

        def mass(self, low, high):
            return 0.5

    task = make_task(TwoExperts(), scheduler=Truncated(shift=3.0))  # timesteps 1000, 857 and 600
    sampled(task, (3.0, 0.5))
    sampled(task, (0.0, 0.5))
    assert task.predictor.scales == [3.0, 0.5, 0.5, 0.5, 0.5]
    assert task.predictor.rows == [4, 4, 4, 2, 4, 4]


def test_embedded_guidance_takes_the_predictors_formula_for_its_second_pass():
    class Distilled(Recorded):
        def forward(self, latents, timestep, text, text_mask, guidance):
            return super().forward(latents, timestep, text, text_mask)

    for second, rows in ((None, 2), (0.0, 2), (0.5, 4)):
        task = make_task(Distilled(), sample=replace(ONE_FRAME, true_guidance=second))
        sampled(task, 4.0)
        assert task.predictor.rows == [rows] * STEPS
    assert task.predictor.scales == [0.5] * STEPS
    task.check_request(SampleRequest(PROMPTS, negative_prompt="blue"))
    with pytest.raises(ContractError, match=r"set task\.sample\.true_guidance above 0, or remove"):
        make_task(Distilled()).check_request(SampleRequest(PROMPTS, negative_prompt="blue"))


def test_guidance_of_another_shape_is_refused_and_names_the_method():
    class Packed(Recorded):
        def guided(self, conditional, unconditional, scale):
            return super().guided(conditional, unconditional, scale).flatten(2)

    with pytest.raises(ContractError) as fault:
        sampled(make_task(Packed()), 4.0)
    assert "guided returned [2, 12, 32] where [2, 12, 2, 4, 4] is needed" in str(fault.value)
