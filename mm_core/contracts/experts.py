"""Predictors of several experts, and what routes to them.

Letters as in `mm_core.contracts.components`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mm_core.contracts.components import NoiseScheduler


@dataclass(frozen=True)
class Expert:
    """A part of a predictor that is responsible for the timesteps low <= t < high of the noise scheduler
    (none: up to pure noise). trained: whether the run trains it; the others serve sampling alone."""

    name: str
    low: float
    high: float | None = None
    trained: bool = True


@runtime_checkable
class SupportsExperts(Protocol):
    """A predictor of several experts, each for timesteps of its own.

    experts: all of them, from noise to clean; guidance scales are listed in this order. What is not trained
        takes no memory until `complete` is entered.
    """

    experts: Sequence[Expert]

    def __call__(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor,
        expert: str | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """As of `Predictor`, by the `expert` of that name for all rows. None: each row by the expert of its
        timestep, which has to be fetched from the device, and may differ between ranks."""

    def complete(self, device: torch.device) -> AbstractContextManager[None]:
        """For the length of the block the experts that are not trained are there as well, on `device`,
        frozen, with the weights that the run began from. CheckpointError where these cannot be read."""


@runtime_checkable
class SupportsTruncated(NoiseScheduler, Protocol):
    """A noise scheduler whose training timesteps can be cut to an interval: what experts are trained with."""

    def truncated(self, low: float, high: float | None = None) -> NoiseScheduler:
        """This scheduler, training timesteps low <= t < high alone (none: up to pure noise), in the same
        proportions to each other. Nothing else changes. ContractError for an interval that is never drawn."""

    def mass(self, low: float, high: float | None = None) -> float:
        """The share of the training timesteps with low <= t < high (none: up to pure noise)."""
