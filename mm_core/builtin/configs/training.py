"""Configs of the built-in optimizer, learning-rate schedules and trackers: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range

_Beta = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True)
class AdamWConfig:
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""

    lr: Annotated[float, Range(ge=0)] = 1.0e-5  # peak learning rate; the schedule multiplies it
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)  # decay of the two moments
    eps: Annotated[float, Range(ge=0)] = 1.0e-8  # added to the denominator
    weight_decay: Annotated[float, Range(ge=0)] = 0.01  # times lr, off every parameter each step


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with moments of 8 bits (Dettmers et al. 2022)."""


@dataclass(frozen=True)
class MuonConfig:
    """Orthogonalised momentum for matrices (Jordan et al. 2024), AdamW for the rest."""

    lr: Annotated[float, Range(ge=0)] = 1.0e-3  # peak learning rate of the matrices
    momentum: _Beta = 0.95  # share of the momentum that a step keeps
    nesterov: bool = True  # looks one step ahead along the momentum
    ns_steps: Annotated[int, Range(ge=1, le=99)] = 5  # Newton-Schulz iterations
    adjust_lr: Literal["match_rms_adamw", "original"] = (
        "match_rms_adamw"  # factor of a matrix's rate: 0.2 sqrt(larger side), or sqrt(max(1, rows / columns))
    )
    weight_decay: Annotated[float, Range(ge=0)] = 0.1  # times lr, off every parameter each step
    adamw_for: tuple[str, ...] = ()  # patterns of modules whose matrices AdamW trains: embeddings, heads
    adamw_lr: Annotated[float, Range(ge=0)] | None = None  # peak rate of AdamW's part; none: lr
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)  # decay of AdamW's two moments
    eps: Annotated[float, Range(ge=0)] = 1.0e-8  # added to AdamW's denominator


@dataclass(frozen=True)
class ConstantConfig:
    """Linear warm-up, then the base rate."""

    warmup_steps: Annotated[int, Range(ge=0)] = 0  # steps from warmup_init to the base rate
    warmup_fraction: Annotated[float, Range(ge=0, le=1)] | None = None  # of the run; instead of warmup_steps
    warmup_init: Annotated[float, Range(ge=0)] = 0.0  # learning rate of the first step; 0 moves nothing

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both set; one of them says how long")


@dataclass(frozen=True)
class LinearConfig(ConstantConfig):
    """Linear warm-up, then a straight line."""

    min_lr: Annotated[float, Range(ge=0)] = 0.0  # learning rate that the run ends at


@dataclass(frozen=True)
class CosineConfig(LinearConfig):
    """Linear warm-up, then half a cosine."""


@dataclass(frozen=True)
class PolynomialConfig(LinearConfig):
    """Linear warm-up, then a power of what is left of the run."""

    power: Annotated[float, Range(gt=0)] = 2.0  # 1 is a straight line


@dataclass(frozen=True)
class WSDConfig(LinearConfig):
    """Warm-up, stable, decay."""

    decay_fraction: Annotated[float, Range(ge=0, le=1)] = 0.1  # of the run, at its end
    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"  # sqrt: 1 - sqrt(progress)


@dataclass(frozen=True)
class TensorBoardConfig:
    """Scalars under `<run>/tensorboard`."""

    flush_secs: Annotated[int, Range(ge=1)] = 30  # seconds until what was logged is on disk
