"""Noise schedulers that depend on the number of tokens: training, evaluation and sampling take the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mm_core.builtin.configs.diffusion import DynamicShift
from mm_core.contracts import Expert, NoiseScheduler, SampleRequest
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.diffusion.mixture import noise_share
from mm_core.tasks.text_to_video.bins import declared_bins
from support.text_to_video import RNG, SmallPredictor, make_batch, make_task

SPEC = {"num_frames": 2, "height": 8, "width": 8}
SHIFT = DynamicShift(base_shift=0.5, max_shift=2.0, base_tokens=4, max_tokens=20)
TOKENS = 2 * 2 * 2
"""Latents [12,2,4,4] in patches of (1,2,2)."""
STATIC = FlowMatch(shift=math.exp(0.5 + 1.5 / 16 * (TOKENS - 4)))


def dynamic_task(predictor=None):
    return make_task(predictor, scheduler=FlowMatch(dynamic_shift=SHIFT))


def test_training_and_evaluation_are_those_of_the_static_shift_of_the_clips_tokens():
    ours, other = dynamic_task(), make_task(scheduler=STATIC)
    batch = make_batch(ours)
    for task in (ours, other):
        task.check(SPEC)
    assert torch.equal(ours.prepare(batch, RNG).given.timestep, other.prepare(batch, RNG).given.timestep)
    assert not torch.equal(
        ours.prepare(batch, RNG).given.timestep, make_task().prepare(batch, RNG).given.timestep
    )
    found, wanted = (task.evaluate(batch, RNG, (0.25, 0.75)) for task in (ours, other))
    assert {name: each.tolist() for name, each in found.sums.items()} == {
        name: each.tolist() for name, each in wanted.sums.items()
    }
    assert ours.bins == other.bins == declared_bins(STATIC)


def test_sampling_takes_the_shift_of_the_clips_that_it_makes():
    request = SampleRequest(prompts=("a",))
    for height, tokens in ((8, TOKENS), (16, 2 * TOKENS)):
        static = FlowMatch(shift=math.exp(0.5 + 1.5 / 16 * (tokens - 4)))
        (found,), (wanted,) = (
            task.sample(replace(request, height=height))
            for task in (dynamic_task(), make_task(scheduler=static))
        )
        assert torch.equal(found.pixels, wanted.pixels)


def test_one_scheduler_is_kept_for_each_size():
    task = dynamic_task()
    first, again, larger = (
        task.schedule_of(shape)[1] for shape in ((1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 8, 8))
    )
    assert first is again and first != larger
    static = make_task()
    assert static.schedule_of((1, 2, 8, 8)) == (static.experts, static.scheduler)


class ByTokens(FlowMatch):
    """Halves by experts, for the test: `truncated` keeps one side of the middle of sigma."""

    low, high = 0.0, math.inf

    def for_tokens(self, tokens: int) -> NoiseScheduler:
        return ByTokens(shift=float(tokens))

    def mass(self, low: float, high: float | None = None) -> float:
        whole = self.timestep_quantile(torch.linspace(0.0005, 0.9995, 1000))
        return float(((whole >= low) & (whole < (high or math.inf))).float().mean())

    def truncated(self, low: float, high: float | None = None) -> NoiseScheduler:
        found = ByTokens(shift=self.shift)
        object.__setattr__(found, "low", low)
        object.__setattr__(found, "high", high or math.inf)
        return found

    def sample_timesteps(self, generators):
        return super().sample_timesteps(generators).clamp(self.low, min(self.high, 1000))


class TwoHalves(SmallPredictor):
    experts = (Expert("high", 500), Expert("low", 0, 500))

    def forward(self, latents, timestep, text, text_mask, expert=None):
        return super().forward(latents, timestep, text, text_mask)

    def complete(self, device):
        raise NotImplementedError


def test_experts_share_the_timesteps_of_the_clips_tokens_and_one_is_drawn_for_all_sizes():
    task = make_task(TwoHalves(), scheduler=ByTokens())
    task.check(SPEC)
    drawn = {"high": 0, "low": 0}
    for step in range(200):
        task.begin_step(step)
        inputs = task.prepare(make_batch(task), RNG)
        drawn[inputs.expert] += 1
        low = (inputs.sigma < 0.5).tolist()
        assert low == [inputs.expert == "low"] * 3 or (inputs.sigma == 0.5).any()
        larger = make_batch(task)
        larger.pixels = larger.pixels.repeat(1, 1, 1, 2, 2)
        assert task.prepare(larger, RNG).expert == inputs.expert
    share = ByTokens(shift=TOKENS).mass(500)
    assert share == pytest.approx(8 / 9, abs=0.01)
    assert drawn["high"] / 200 == pytest.approx(share, abs=0.07)  # 3 standard deviations of 0.022


def test_noise_shares_of_the_batch_are_those_of_the_larger_shift():
    task = dynamic_task()
    inputs = task.prepare(make_batch(task), RNG)
    torch.testing.assert_close(inputs.sigma, noise_share(STATIC, inputs.given.timestep))
