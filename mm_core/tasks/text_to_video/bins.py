"""The training loss by noise level: the scale, its declared shares, and where a micro-batch falls."""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core.contracts import Bins, NoiseScheduler
from mm_core.diffusion.mixture import noise_share

COUNT = 10
"""Bins of equal width between sigma 0 and 1."""

_GRID = 100_000
"""Quantiles that the declared shares are counted from: right to about one of them a bin."""


def declared_bins(scheduler: NoiseScheduler) -> Bins:
    """The sigma scale, with the share of the training timesteps that falls into each bin."""
    u = (torch.arange(_GRID, dtype=torch.float64, device="cpu") + 0.5) / _GRID
    places = bin_of(noise_share(scheduler, scheduler.timestep_quantile(u)))
    counts = torch.bincount(places, minlength=COUNT)
    edges = tuple(number / COUNT for number in range(COUNT + 1))
    return Bins("sigma", edges, tuple((counts.double() / _GRID).tolist()))


def bin_of(sigma: Tensor) -> Tensor:
    """int64 [B]: the bin of each sigma; 1 itself belongs to the last."""
    return (sigma * COUNT).long().clamp(0, COUNT - 1)


def sum_by_bin(sigma: Tensor, losses: Tensor, weights: Tensor) -> Tensor:
    """[2, COUNT] float32 on the device of sigma[B]: losses[B] and weights[B] summed in each bin."""
    rows = torch.stack([losses.detach(), weights]).float()
    hit = bin_of(sigma)[:, None] == torch.arange(COUNT, device=sigma.device)
    # Selected, not multiplied: a loss that is not finite stays in its own bin. No atomics, no wait.
    return torch.where(hit, rows[..., None], 0.0).sum(1)
