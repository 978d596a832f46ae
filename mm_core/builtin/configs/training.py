"""Configs of the built-in optimizers, learning-rate schedules and local trackers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range

_Beta = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True)
class AdamWConfig:
    """Config of the optimizer `adamw`: decoupled weight decay (Loshchilov and Hutter 2019)."""

    lr: Annotated[float, Range(ge=0)] = 1.0e-5  # peak learning rate; the schedule multiplies it
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)  # decay of the two moments
    eps: Annotated[float, Range(ge=0)] = 1.0e-8  # added to the denominator
    weight_decay: Annotated[float, Range(ge=0)] = 0.01  # a step removes lr times this share of each parameter


@dataclass(frozen=True)
class AdamConfig(AdamWConfig):
    """Config of the optimizer `adam`: Adam with L2 decay (Kingma and Ba 2015)."""

    weight_decay: Annotated[float, Range(ge=0)] = 0.0  # this share of each parameter is added to its gradient


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """Config of the optimizer `adamw_8bit`: AdamW with 8-bit moments (Dettmers et al. 2022)."""


@dataclass(frozen=True)
class AdamWBF16Config(AdamWConfig):
    """Config of the optimizer `adamw_bf16`: AdamW with bfloat16 moments, rounded at random."""

    rounding_seed: int = 0  # seed of the rounding


@dataclass(frozen=True)
class MuonConfig:
    """Config of the optimizer `muon`: orthogonalised momentum (Jordan et al. 2024), AdamW for the rest."""

    lr: Annotated[float, Range(ge=0)] = 1.0e-3  # peak learning rate of the matrices
    momentum: _Beta = 0.95  # share of the momentum that a step keeps
    nesterov: bool = True  # Nesterov momentum
    ns_steps: Annotated[int, Range(ge=1, le=99)] = 5  # Newton-Schulz iterations
    adjust_lr: Literal["match_rms_adamw", "original"] = (
        "match_rms_adamw"  # factor of a matrix's rate: 0.2 sqrt(larger side), or sqrt(max(1, rows / columns))
    )
    weight_decay: Annotated[float, Range(ge=0)] = 0.1  # a step removes lr times this share of each parameter
    adamw_for: tuple[str, ...] = ()  # patterns of modules with matrices trained by AdamW: embeddings, heads
    adamw_lr: Annotated[float, Range(ge=0)] | None = None  # peak learning rate of AdamW's part; null: lr
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)  # decay of AdamW's two moments
    eps: Annotated[float, Range(ge=0)] = 1.0e-8  # added to AdamW's denominator


@dataclass(frozen=True)
class ConstantConfig:
    """Config of the schedule `constant`: linear warm-up, then the base learning rate."""

    warmup_steps: Annotated[int, Range(ge=0)] = 0  # steps from warmup_init to the base rate
    warmup_fraction: Annotated[float, Range(ge=0, le=1)] | None = None  # of the run; instead of warmup_steps
    warmup_init: Annotated[float, Range(ge=0)] = 0.0  # learning rate of the first step; 0 changes no weight
    warmup_type: Literal["linear", "log"] = "linear"  # log: steep at first, log(step + 1) / log(steps)

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both set; remove one of them")


@dataclass(frozen=True)
class LinearConfig(ConstantConfig):
    """Config of the schedule `linear`: linear warm-up, then a straight line down to `min_lr`."""

    min_lr: Annotated[float, Range(ge=0)] = 0.0  # learning rate at the end of the run


@dataclass(frozen=True)
class WarmupDecayConfig(LinearConfig):
    """Config of the schedule `warmup_decay`: `linear` with a warm-up that is logarithmic by default."""

    warmup_type: Literal["linear", "log"] = "log"  # log: steep at first, log(step + 1) / log(steps)


@dataclass(frozen=True)
class OneCycleConfig:
    """Config of the schedule `one_cycle`: from `min_lr` to the base rate and back, then a decay."""

    min_lr: Annotated[float, Range(ge=0)] = 0.0  # learning rate at both ends of the cycle
    cycle_first_step_size: Annotated[int, Range(ge=1)] = 2000  # steps of the rise
    cycle_second_step_size: Annotated[int, Range(ge=1)] | None = None  # steps of the fall; null: as many
    cycle_first_stair_count: Annotated[int, Range(ge=0)] = 0  # levels of the rise; 0 is a straight line
    cycle_second_stair_count: Annotated[int, Range(ge=0)] | None = None  # levels of the fall; null: as many
    decay_step_size: Annotated[int, Range(ge=0)] = 0  # steps after the cycle per decay_lr_rate; 0: no decay
    decay_lr_rate: Annotated[float, Range(ge=0)] = 0.0  # min_lr is divided by 1 + rate * steps / step size


@dataclass(frozen=True)
class LRRangeTestConfig:
    """Config of the schedule `lr_range_test`: from the base rate up, to find the largest rate that trains."""

    lr_range_test_step_size: Annotated[int, Range(ge=1)] = 2000  # steps of one rise
    lr_range_test_step_rate: Annotated[float, Range(ge=0)] = 1.0  # one rise, in base rates
    lr_range_test_staircase: bool = False  # rise at once, at the end of these steps


@dataclass(frozen=True)
class CosineConfig(LinearConfig):
    """Config of the schedule `cosine`: linear warm-up, then half a cosine down to `min_lr`."""


@dataclass(frozen=True)
class PolynomialConfig(LinearConfig):
    """Config of the schedule `polynomial`: linear warm-up, then a power of the remaining share of the run."""

    power: Annotated[float, Range(gt=0)] = 2.0  # 1 is a straight line


@dataclass(frozen=True)
class WSDConfig(LinearConfig):
    """Config of the schedule `wsd`: warm-up, stable, decay."""

    decay_fraction: Annotated[float, Range(ge=0, le=1)] = 0.1  # share of the run that decays, at its end
    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"  # sqrt: 1 - sqrt(progress)


@dataclass(frozen=True)
class TensorBoardConfig:
    """Config of the tracker `tensorboard`: scalars and clips under `<run>/tensorboard`."""

    flush_secs: Annotated[int, Range(ge=1)] = 30  # seconds until logged values are written to disk
