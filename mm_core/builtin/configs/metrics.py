"""Configs of the built-in metrics: torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentPSNRConfig:
    """`latent_psnr` has nothing to set."""


@dataclass(frozen=True)
class FrameChangeConfig:
    """`frame_change` has nothing to set."""
