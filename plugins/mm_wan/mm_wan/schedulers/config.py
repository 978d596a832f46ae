"""Config of the noise scheduler `wan/flow_match`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.errors import ConfigError, plural
from mm_core.plugin import InputPath, Range

Density = Literal["uniform", "logit_normal", "mode", "beta"]
Weighting = Literal["gaussian", "none", "min_snr"]
SolverName = Literal["unipc", "euler", "dpm++"]

_Share = Annotated[float, Range(ge=0, le=1)]
_Positive = Annotated[float, Range(gt=0)]


@dataclass(frozen=True)
class WanFlowMatchConfig:
    """Flow matching over a schedule of discrete noise levels, as commonly used to fine-tune Wan."""

    num_train_timesteps: Annotated[int, Range(ge=2)] = 1000  # number of noise levels; the timestep of sigma 1
    shift: _Positive = 5.0  # shifts noise levels towards noise
    sigma_min: _Share = 0.0  # lowest noise level, before the shift
    sigma_max: _Share = 1.0  # highest noise level, before the shift
    extra_one_step: bool = True  # compute one more level and drop the last: sigma_min itself is not trained
    timesteps: Density = "uniform"  # density of the trained levels, before the shift
    min_timestep_boundary: _Share = 0.0  # first trained level, as a share of the levels counted from noise
    max_timestep_boundary: _Share = 1.0  # end of the trained levels, as a share counted from noise
    draw_per: Literal["sample", "micro_batch"] = "sample"  # one timestep per sample, or per micro-batch
    logit_mean: float = 0.0  # mean for `logit_normal`; above 0: more noise
    logit_std: _Positive = 1.0  # standard deviation for `logit_normal`
    mode_scale: Annotated[float, Range(ge=-1, le=1.75)] = (
        1.29  # scale for `mode`; above 0: more middle levels
    )
    beta_alpha: Annotated[float, Range(gt=0, le=100)] = 1.5  # alpha for `beta`; above beta_beta: more noise
    beta_beta: Annotated[float, Range(gt=0, le=100)] = 1.0  # beta for `beta`
    loss_weighting: Weighting = (
        "gaussian"  # weight of a sample's squared error, as a function of its timestep
    )
    min_snr_gamma: _Positive = 5.0  # for `min_snr`: signal-to-noise ratio above which weights stop rising
    solver: SolverName | None = None  # sampler; null: as in from_pretrained, or unipc
    solver_order: Annotated[int, Range(ge=1, le=3)] | None = (
        None  # order of the sampler; null: as in from_pretrained, or 2
    )
    sample_shift: _Positive | None = None  # `shift` when sampling; null: as in from_pretrained, or `shift`
    from_pretrained: InputPath | None = None  # a pipeline's scheduler folder: its settings for sampling

    def __post_init__(self) -> None:
        low, high = self.min_timestep_boundary, self.max_timestep_boundary
        if not self.sigma_min < self.sigma_max:
            raise ConfigError(
                f"sigma_min {self.sigma_min:g} must be below sigma_max {self.sigma_max:g}",
                hint="leave both out for 0 and 1",
            )
        if not low < high:
            raise ConfigError(
                f"min_timestep_boundary {low:g} must be below max_timestep_boundary {high:g}",
                hint="both are shares of the schedule, counted from noise: with shift 5, 0 to 0.417 are the "
                "timesteps from 875 to 1000",
            )
        if int(low * self.num_train_timesteps) == int(high * self.num_train_timesteps):
            raise ConfigError(
                f"none of the {plural(self.num_train_timesteps, 'timestep')} is between"
                f" min_timestep_boundary {low:g} and max_timestep_boundary {high:g}",
                hint="set them further apart",
            )
        if self.solver == "euler" and self.solver_order not in (None, 1):
            raise ConfigError(
                f"solver_order {self.solver_order} does not apply to the solver euler, which has order 1",
                hint="leave solver_order out",
            )
