"""Configs of the built-in optimizer, learning-rate schedules and trackers: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_core.plugin.fields import Range

_Beta = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True)
class AdamWConfig:
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""

    lr: Annotated[float, Range(ge=0)] = 1.0e-5  # peak learning rate; the schedule multiplies it
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)  # decay of the two moments
    eps: Annotated[float, Range(ge=0)] = 1.0e-8  # added to the denominator
    weight_decay: Annotated[float, Range(ge=0)] = 0.01  # times lr, off every parameter each step


@dataclass(frozen=True)
class ConstantConfig:
    """Linear warm-up, then the base rate."""

    warmup_steps: Annotated[int, Range(ge=0)] = (
        0  # steps from 0 to the base rate; the first one moves nothing
    )


@dataclass(frozen=True)
class CosineConfig:
    """Linear warm-up, then half a cosine."""

    warmup_steps: Annotated[int, Range(ge=0)] = (
        0  # steps from 0 to the base rate; the first one moves nothing
    )
    min_lr_ratio: Annotated[float, Range(ge=0, le=1)] = (
        0.0  # share of the base rate that the last step ends at
    )


@dataclass(frozen=True)
class TensorBoardConfig:
    """Scalars under `<run>/tensorboard`."""

    flush_secs: Annotated[int, Range(ge=1)] = 30  # seconds until what was logged is on disk


@dataclass(frozen=True)
class JsonlConfig:
    """`<run>/metrics.jsonl` has nothing to set."""
