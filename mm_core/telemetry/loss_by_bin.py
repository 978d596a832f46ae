"""The training loss and gradient norm along a scale, such as the noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mm_core.contracts import Bins

_STEPS = 64
"""Steps that are summed in one operation."""


class BinnedLoss:
    """Sums the training loss and gradient norm in bins of a scale, such as the noise level.

    Nothing is fetched from the device until `flush`. A step has one gradient norm: each bin gets it with its
    share of the step's sample weight over all ranks, so that the norm of a bin is a weighted mean over steps.
    With one sample per step it is exact.

    Args:
        bins: the scale and its bins.
        gather: the collective that `flush` runs.
    """

    def __init__(self, bins: Bins, gather: Callable[[Tensor], Iterable[Tensor]]) -> None:
        self._bins, self._gather = bins, gather
        self._labels = [f"{low:g}-{high:g}" for low, high in zip(bins.edges, bins.edges[1:], strict=False)]
        self._step: Tensor | None = None
        self._taken: list[tuple[Tensor, float, float]] = []
        self._losses: Tensor | None = None
        self._norms: Tensor | None = None

    def micro(self, bins: Tensor) -> None:
        """Adds a micro-batch: [2, n] sums of the loss and of the sample weights in each bin."""
        self._step = bins.clone() if self._step is None else self._step + bins

    def step(self, grad_norm: float, weight: float) -> None:
        """Ends a training step; a step whose gradient is not finite is excluded from the means of its bins.

        Args:
            grad_norm: global gradient norm of the step.
            weight: total sample weight of the step, over all ranks.
        """
        if self._step is None or not math.isfinite(grad_norm):
            self._step = None
            return
        self._taken.append((self._step, grad_norm, weight))
        self._step = None
        if len(self._taken) == _STEPS:
            self._fold()

    def _fold(self) -> None:
        """Sums many steps in one operation: an operation on few numbers costs as much as on many."""
        if not self._taken:
            return
        tables, grad_norms, weights = zip(*self._taken, strict=True)
        steps = torch.stack(tables)
        norm, weight = torch.tensor([grad_norms, weights], device=steps.device)[..., None]
        shares = steps[:, 1] / weight.clamp_min(torch.finfo(torch.float32).tiny)
        norms = torch.stack([(shares * norm).sum(0), shares.sum(0)])
        losses = steps.sum(0)
        self._losses = losses if self._losses is None else self._losses + losses
        self._norms = norms if self._norms is None else self._norms + norms
        self._taken = []

    def flush(self) -> dict[str, float]:
        """Metrics by bin: `loss_by_sigma/0-0.1`, `grad_norm_by_sigma/...` and `timesteps_by_sigma/...`.

        The last is the share of the sample weight in each bin; bins without samples are omitted. All ranks
        must call it.
        """
        self._fold()
        size = len(self._labels)
        table = torch.zeros(4, size, dtype=torch.float64)
        if self._losses is not None and self._norms is not None:
            table = torch.cat([self._losses, self._norms]).cpu().double()
        losses, weights, norms, shares = torch.stack(list(self._gather(table.flatten()))).sum(0).view(4, size)
        self._losses = self._norms = None
        total, name, found = float(weights.sum()), self._bins.name, {}
        for index, label in enumerate(self._labels):
            if weights[index] > 0:
                found[f"loss_by_{name}/{label}"] = float(losses[index] / weights[index])
                found[f"grad_norm_by_{name}/{label}"] = float(norms[index] / shares[index])
                found[f"timesteps_by_{name}/{label}"] = float(weights[index]) / total
        return found
