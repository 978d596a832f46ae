"""Config of the noise scheduler `wan/flow_match`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.errors import ConfigError
from mm_core.plugin import Range

Density = Literal["uniform", "logit_normal", "mode", "beta"]
Weighting = Literal["gaussian", "none", "min_snr"]
SolverName = Literal["unipc", "euler", "dpm++"]

_Share = Annotated[float, Range(ge=0, le=1)]
_Positive = Annotated[float, Range(gt=0)]


@dataclass(frozen=True)
class WanFlowMatchConfig:
    """Flow matching over a schedule of discrete noise levels, as Wan is fine-tuned in the field."""

    num_train_timesteps: Annotated[int, Range(ge=2)] = 1000  # noise levels; the timestep of sigma 1
    shift: _Positive = 5.0  # moves noise levels towards noise
    sigma_min: _Share = 0.0  # where the levels end, before the shift
    sigma_max: _Share = 1.0  # where the levels begin, before the shift
    extra_one_step: bool = True  # one level more, and the last left out: sigma_min itself is not trained
    timesteps: Density = "uniform"  # density over the levels that training draws from, before the shift
    min_timestep_boundary: _Share = 0.0  # share of the levels, counted from noise, where training begins
    max_timestep_boundary: _Share = 1.0  # share of the levels, counted from noise, where training ends
    draw_per: Literal["sample", "micro_batch"] = "sample"  # what shares one timestep
    logit_mean: float = 0.0  # of `logit_normal`; above 0 is more noise
    logit_std: _Positive = 1.0  # of `logit_normal`
    mode_scale: Annotated[float, Range(ge=-1, le=1.75)] = 1.29  # of `mode`; above 0 favours middle levels
    beta_alpha: Annotated[float, Range(gt=0, le=100)] = 1.5  # of `beta`; above beta_beta is more noise
    beta_beta: Annotated[float, Range(gt=0, le=100)] = 1.0  # of `beta`
    loss_weighting: Weighting = "gaussian"  # factor of a sample's squared error, by its timestep
    min_snr_gamma: _Positive = 5.0  # of `min_snr`: the signal-to-noise ratio that weights stop rising at
    solver: SolverName | None = None  # of sampling; none: that of from_pretrained, or unipc
    solver_order: Annotated[int, Range(ge=1, le=3)] | None = None  # none: that of from_pretrained, or 2
    sample_shift: _Positive | None = None  # `shift` of sampling; none: that of from_pretrained, or `shift`
    from_pretrained: str | None = None  # a pipeline's scheduler folder, whose settings sampling follows

    def __post_init__(self) -> None:
        low, high = self.min_timestep_boundary, self.max_timestep_boundary
        if not self.sigma_min < self.sigma_max:
            raise ConfigError(f"sigma_min {self.sigma_min:g} must be below sigma_max {self.sigma_max:g}")
        if not low < high:
            raise ConfigError(
                f"min_timestep_boundary {low:g} must be below max_timestep_boundary {high:g}",
                hint="both are shares of the schedule, counted from noise: 0 to 0.417 are a shift of 5's "
                "timesteps from 875 to 1000",
            )
        if int(low * self.num_train_timesteps) == int(high * self.num_train_timesteps):
            raise ConfigError(
                f"min_timestep_boundary {low:g} and max_timestep_boundary {high:g} have none of the "
                f"{self.num_train_timesteps} timesteps between them"
            )
        if self.solver == "euler" and self.solver_order not in (None, 1):
            raise ConfigError(
                f"solver_order {self.solver_order} is not Euler's, which is of the first order",
                hint="leave solver_order out",
            )
