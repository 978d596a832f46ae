"""Noise level and clean estimate for any noise scheduler that mixes clean latents and noise linearly.

At a timestep, x_t = a x_0 + s eps and target = c x_0 + d eps. The four factors are found by mixing ones and
zeros, so that rectified flow and variance-preserving schedules need no separate code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core.contracts import NoiseScheduler


def noise_share(scheduler: NoiseScheduler, timestep: Tensor) -> Tensor:
    """Noise level of a diffusion timestep, s / (a + s): [B] float32 from 0 (clean) to 1 (noise).

    For rectified flow it is sigma.
    """
    one = _ones(timestep)
    signal = scheduler.add_noise(one, one * 0, timestep)
    noise = scheduler.add_noise(one * 0, one, timestep)
    return (noise / (signal + noise)).flatten().float()


def clean_estimate(scheduler: NoiseScheduler, noisy: Tensor, predicted: Tensor, timestep: Tensor) -> Tensor:
    """Estimates clean latents from noisy latents and a diffusion model's prediction.

    x_0 = (d x_t - s target) / (a d - s c).

    Args:
        scheduler: the noise scheduler.
        noisy: x_t, [B,C,T,H,W].
        predicted: the prediction of the target, [B,C,T,H,W].
        timestep: [B].
    """
    one = _ones(timestep)
    a, s = scheduler.add_noise(one, one * 0, timestep), scheduler.add_noise(one * 0, one, timestep)
    c, d = scheduler.target(one, one * 0, timestep), scheduler.target(one * 0, one, timestep)
    return (d * noisy - s * predicted) / (a * d - s * c)


def _ones(timestep: Tensor) -> Tensor:
    return torch.ones(len(timestep), 1, 1, 1, 1, device=timestep.device)
