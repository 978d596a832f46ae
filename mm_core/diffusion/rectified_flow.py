"""Rectified flow as pure functions of tensors. sigma is 0 for clean latents and 1 for noise.

Equations: Liu et al. 2022 (rectified flow, https://arxiv.org/abs/2209.03003) and Esser et al. 2024 (SD3,
https://arxiv.org/abs/2403.03206). Equation numbers refer to the latter, which writes t for sigma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """Draws uniform noise levels in [0, 1): [B] float32 on CPU, one from each generator."""
    return torch.stack([torch.rand((), generator=generator) for generator in generators])


def logit_normal(generators: Sequence[torch.Generator], mean: float, std: float) -> Tensor:
    """Draws noise levels u in (0, 1) with logit(u) ~ N(mean, std) (SD3, eq. 19): [B] float32 on CPU."""
    normal = torch.stack([torch.randn((), generator=generator) for generator in generators])
    return torch.sigmoid(mean + std * normal)


def logit_normal_quantile(u: Tensor, mean: float, std: float) -> Tensor:
    """The noise level below which a share u of the logit-normal density lies: the inverse CDF."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """Shifts noise levels, for more noise in larger clips: sigma = s u / (1 + (s - 1) u) (SD3, eq. 23)."""
    return shift * u / (1 + (shift - 1) * u)


def interpolate(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Noisy latents of rectified flow, x_t = (1 - sigma) x_0 + sigma eps (SD3, eq. 13), with sigma[B]."""
    sigma = sigma.reshape(-1, *[1] * (latents.dim() - 1))
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """Velocity of rectified flow, dx_t / dsigma = eps - x_0: the same at every noise level."""
    return noise - latents


def euler(velocity_at: Callable[[Tensor, Tensor], Tensor], noise: Tensor, sigmas: Tensor) -> Tensor:
    """Samples latents by Euler's method: solves dx / dsigma = velocity_at(x, sigma), starting from noise.

    Args:
        velocity_at: velocity for latents and a noise level.
        noise: the latents at sigmas[0].
        sigmas: noise levels [n+1] for n steps.
    """
    x = noise
    for here, there in pairwise(sigmas):
        x = x + (there - here) * velocity_at(x, here)
    return x
