"""What follows from a scheduler's linear mixtures of clean latents and noise, for any scheduler.

At a timestep, x_t = a x_0 + s eps and target = c x_0 + d eps. The four factors are read off by mixing
ones and zeros, so that rectified flow and variance-preserving schedules need no code of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core.contracts import NoiseScheduler


def noise_share(scheduler: NoiseScheduler, timestep: Tensor) -> Tensor:
    """s / (a + s), [B] float32 from 0 (clean) to 1 (noise): sigma itself for rectified flow."""
    one = _ones(timestep)
    signal = scheduler.add_noise(one, one * 0, timestep)
    noise = scheduler.add_noise(one * 0, one, timestep)
    return (noise / (signal + noise)).flatten().float()


def clean_estimate(scheduler: NoiseScheduler, noisy: Tensor, predicted: Tensor, timestep: Tensor) -> Tensor:
    """x_0[B,C,T,H,W] from x_t and a prediction of the target: x_0 = (d x_t - s target) / (a d - s c)."""
    one = _ones(timestep)
    a, s = scheduler.add_noise(one, one * 0, timestep), scheduler.add_noise(one * 0, one, timestep)
    c, d = scheduler.target(one, one * 0, timestep), scheduler.target(one * 0, one, timestep)
    return (d * noisy - s * predicted) / (a * d - s * c)


def _ones(timestep: Tensor) -> Tensor:
    return torch.ones(len(timestep), 1, 1, 1, 1, device=timestep.device)
