"""Rectified flow as pure functions of tensors. sigma is 0 for clean latents and 1 for noise.

Equations: Liu et al. 2022 (rectified flow, https://arxiv.org/abs/2209.03003) and Esser et al. 2024
(SD3, https://arxiv.org/abs/2403.03206), whose numbers are given; there t stands for our sigma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """u[B] in [0, 1), float32 on CPU, one draw a generator."""
    return torch.stack([torch.rand((), generator=generator) for generator in generators])


def logit_normal(generators: Sequence[torch.Generator], mean: float, std: float) -> Tensor:
    """u[B] in (0, 1), float32 on CPU, with logit(u) ~ N(mean, std) (SD3, eq. 19)."""
    normal = torch.stack([torch.randn((), generator=generator) for generator in generators])
    return torch.sigmoid(mean + std * normal)


def logit_normal_quantile(u: Tensor, mean: float, std: float) -> Tensor:
    """The value below which a share u of the logit-normal density lies: its inverse CDF."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """sigma = s u / (1 + (s - 1) u): more noise for larger clips (SD3, eq. 23, s = sqrt(m / n))."""
    return shift * u / (1 + (shift - 1) * u)


def interpolate(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_t = (1 - sigma) x_0 + sigma eps (SD3, eq. 13). sigma[B] broadcasts over the further dimensions."""
    sigma = sigma.reshape(-1, *[1] * (latents.dim() - 1))
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """dx_t / dsigma = eps - x_0, the same at every sigma."""
    return noise - latents


def euler(velocity_at: Callable[[Tensor, Tensor], Tensor], noise: Tensor, sigmas: Tensor) -> Tensor:
    """Solves dx / dsigma = velocity_at(x, sigma) along sigmas[n+1] by Euler's method, from `noise`."""
    x = noise
    for here, there in pairwise(sigmas):
        x = x + (there - here) * velocity_at(x, here)
    return x
