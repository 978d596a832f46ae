"""Protocols of predictors with several experts, each for an interval of timesteps.

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
    """An expert of a predictor, responsible for the timesteps low <= t < high of the noise scheduler."""

    name: str
    low: float
    high: float | None = None  # None: up to pure noise
    trained: bool = True  # false: used only for sampling


@runtime_checkable
class SupportsExperts(Protocol):
    """Capability of a predictor with several experts, each for its own timesteps.

    Attributes:
        experts: all experts, from noise to clean; guidance scales are listed in this order. Experts that are
            not trained take no memory until `complete` is entered.
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
        """The forward of `Predictor`, with the expert named by `expert` for all rows.

        None: each row uses the expert of its timestep, which must be fetched from the device and may differ
        between ranks.
        """

    def complete(self, device: torch.device) -> AbstractContextManager[None]:
        """Within the block, the predictor's untrained experts are loaded too, frozen, on a device.

        They have the weights that the run started from.

        Raises:
            CheckpointError: these weights cannot be read.
        """


@runtime_checkable
class SupportsTruncated(NoiseScheduler, Protocol):
    """Capability of a noise scheduler whose training timesteps can be limited to an expert's interval."""

    def truncated(self, low: float, high: float | None = None) -> NoiseScheduler:
        """This noise scheduler, limited to training timesteps low <= t < high in the same proportions.

        Args:
            low: first timestep.
            high: end of the interval; None: up to pure noise.

        Raises:
            ContractError: no training timestep is in the interval.
        """

    def mass(self, low: float, high: float | None = None) -> float:
        """The share of the scheduler's training timesteps with low <= t < high (None: up to pure noise)."""
