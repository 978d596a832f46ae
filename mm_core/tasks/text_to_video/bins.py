"""The training loss by noise level: the scale, the expected share of each bin, the bin of each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core.contracts import Bins, NoiseScheduler
from mm_core.diffusion.mixture import noise_share

COUNT = 10
"""Number of bins between sigma 0 and 1, all of the same width."""

_GRID = 100_000
"""Number of quantiles used to compute the expected shares; each share is exact to about 1 / _GRID."""


def declared_bins(scheduler: NoiseScheduler) -> Bins:
    """The noise-level bins of the training loss, with the share of training timesteps in each bin."""
    u = (torch.arange(_GRID, dtype=torch.float64, device="cpu") + 0.5) / _GRID
    places = bin_of(noise_share(scheduler, scheduler.timestep_quantile(u)))
    counts = torch.bincount(places, minlength=COUNT)
    edges = tuple(number / COUNT for number in range(COUNT + 1))
    return Bins("sigma", edges, tuple((counts.double() / _GRID).tolist()))


def bin_of(sigma: Tensor) -> Tensor:
    """The loss bin of each noise level, int64 [B]; sigma 1 belongs to the last bin."""
    return (sigma * COUNT).long().clamp(0, COUNT - 1)


def sum_by_bin(sigma: Tensor, losses: Tensor, weights: Tensor) -> Tensor:
    """Losses and sample weights summed in each noise-level bin: float32 [2, COUNT], on the device of `sigma`.

    Args:
        sigma: [B], the noise level of each sample.
        losses: [B].
        weights: [B].
    """
    rows = torch.stack([losses.detach(), weights]).float()
    hit = bin_of(sigma)[:, None] == torch.arange(COUNT, device=sigma.device)
    # torch.where instead of a product: a non-finite loss stays in its own bin. No atomics, no sync.
    return torch.where(hit, rows[..., None], 0.0).sum(1)
