"""Noise level and clean estimate follow from a scheduler's own mixtures, whatever they are."""

import pytest
import torch

from mm_core.contracts import Randomness
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.diffusion.mixture import clean_estimate, noise_share

RNG = Randomness(3)


class VariancePreserving:
    """x_t = cos(p) x_0 + sin(p) eps with p = pi/2 t/1000 (Ho et al. 2020, in continuous time)."""

    def __init__(self, target: str) -> None:
        self.kind = target

    def _factors(self, timestep):
        angle = (timestep / 1000 * torch.pi / 2).view(-1, 1, 1, 1, 1)
        return angle.cos(), angle.sin()

    def add_noise(self, latents, noise, timestep):
        a, s = self._factors(timestep)
        return a * latents + s * noise

    def target(self, latents, noise, timestep):
        a, s = self._factors(timestep)
        return {"eps": noise, "x0": latents, "v": a * noise - s * latents}[self.kind] + 0 * latents


SCHEDULERS = [FlowMatch(shift=3.0), *map(VariancePreserving, ("eps", "x0", "v"))]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_estimate_from_the_exact_target_is_the_clean_latents(scheduler):
    clean, noise = RNG.normal((3, 2, 1, 4, 4), "x0"), RNG.normal((3, 2, 1, 4, 4), "eps")
    timestep = torch.tensor([50.0, 500.0, 900.0])
    noisy = scheduler.add_noise(clean, noise, timestep)
    estimate = clean_estimate(scheduler, noisy, scheduler.target(clean, noise, timestep), timestep)
    torch.testing.assert_close(estimate, clean, rtol=0, atol=2e-5)


def test_the_estimate_of_rectified_flow_is_one_step_to_the_end():
    noisy, velocity = RNG.normal((2, 2, 1, 4, 4), "xt"), RNG.normal((2, 2, 1, 4, 4), "v")
    timestep = torch.tensor([250.0, 998.7])
    expected = noisy - (timestep / 1000).view(-1, 1, 1, 1, 1) * velocity
    torch.testing.assert_close(clean_estimate(FlowMatch(), noisy, velocity, timestep), expected)


def test_the_noise_share_is_sigma_for_rectified_flow_and_rises_for_others():
    timestep = torch.tensor([0.0, 1.0, 300.0, 998.7, 1000.0])
    torch.testing.assert_close(noise_share(FlowMatch(shift=5.0), timestep), timestep / 1000)
    share = noise_share(VariancePreserving("eps"), timestep)
    assert share[0] == 0 and share[-1] == pytest.approx(1, abs=1e-6) and (share.diff() > 0).all()
