"""The noise scheduler `wan/flow_match`: flow matching over discrete noise levels, sampled by Diffusers.

Letters: B batch; N noise levels; i their index, 0 for pure noise; k = N - 1 - i, which rises with the noise.
Sources: Lipman et al. 2023 (flow matching, https://arxiv.org/abs/2210.02747); Esser et al. 2024 (SD3,
https://arxiv.org/abs/2403.03206), whose t is our sigma. Levels, boundaries and Gaussian weights follow common
practice for fine-tuning Wan (https://github.com/modelscope/DiffSynth-Studio, flow match scheduler).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mm_core.contracts import VelocityField
from mm_core.diffusion import rectified_flow
from mm_core.errors import ContractError
from mm_wan.schedulers import solvers
from mm_wan.schedulers.config import WanFlowMatchConfig


class WanFlowMatch:
    """Wan's noise schedule for training, and its sampling. Satisfies `mm_core.contracts.NoiseScheduler`.

    With u = linspace(sigma_max, sigma_min, N) (`extra_one_step`: N + 1 points without the last), the
    levels are sigma = s u / (1 + (s - 1) u), with s = shift, and the timesteps are N sigma. Training draws
    levels; every other function takes any timestep. `WanFlowMatchConfig` describes the fields.

    Raises:
        ConfigError: fields contradict each other or the scheduler folder.
        CheckpointError: the scheduler folder cannot sample Wan; or, when sampling, is missing.
        ContractError: the density has no mass between the boundaries, or all loss weights are 0.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = config = WanFlowMatchConfig(**fields)
        self.num_train_timesteps = count = config.num_train_timesteps
        sigmas = _levels(config)
        # Everything below is ordered by k: ascending noise.
        self._timesteps = (count * sigmas).flip(0).float()
        self._cdf = _density_cdf(config)
        self._gaussian = _gaussian_constants(sigmas)
        if config.loss_weighting == "gaussian" and self._gaussian[1] == 0:
            raise ContractError(
                "the Gaussian loss weights of these noise levels are all 0",
                where="scheduler",
                hint="raise num_train_timesteps, or set loss_weighting: none",
            )
        self._first = count - int(config.max_timestep_boundary * count)
        self._stop = count - int(config.min_timestep_boundary * count)
        self._check_mass()
        if config.from_pretrained is not None and not self.missing_files():
            _ = self.solver  # an unsuitable scheduler folder is reported now, not when validation samples

    # -- training ----------------------------------------------------------------------------------

    def sample_timesteps(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draws training timesteps [B] float32 on CPU from Wan's noise schedule, row i with generators[i].
        With `draw_per: micro_batch`, all rows use the first generator, so they depend on how samples are
        batched."""
        count = len(generators)
        if self.config.draw_per == "micro_batch":
            generators = generators[:1]
        draws = [torch.rand((), generator=g, dtype=torch.float64, device="cpu") for g in generators]
        return self.timestep_quantile(torch.stack(draws)).expand(count).clone()

    def timestep_quantile(self, u: Tensor) -> Tensor:
        """Quantiles of the training timesteps in Wan's noise schedule: the level whose interval of the
        cumulative distribution contains u.

        Args:
            u: [B] in [0, 1), on CPU.

        Returns:
            timestep [B] float32.
        """
        low, high = self._cdf[self._first], self._cdf[self._stop]
        ends = (self._cdf[self._first + 1 : self._stop + 1] - low) / (high - low)
        # right=True: a draw on the border between two levels belongs to the upper; levels without mass get
        # none.
        index = torch.searchsorted(ends, u.double().contiguous(), right=True)
        return self._timesteps[self._first : self._stop][index.clamp(max=len(ends) - 1)]

    def truncated(self, low: float, high: float | None = None) -> Self:
        """A copy of this noise scheduler that draws only timesteps low <= t < high, in unchanged
        proportions: the scheduler for training one of Wan's experts.

        Args:
            low: first timestep.
            high: end of the interval; None: up to pure noise.

        Raises:
            ContractError: training never draws from this interval.
        """
        other = copy.copy(self)
        other._first, other._stop = self._between(low, high)
        other._check_mass(f"timesteps from {low:g} to {'the end' if high is None else format(high, 'g')}")
        return other

    def mass(self, low: float, high: float | None = None) -> float:
        """Share of the training timesteps with low <= t < high in Wan's noise schedule (high None: up to pure
        noise)."""
        first, stop = self._between(low, high)
        if first >= stop:
            return 0.0
        whole = self._cdf[self._stop] - self._cdf[self._first]
        return float((self._cdf[stop] - self._cdf[first]) / whole)

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Adds noise to latents [B,C,T,H,W] at a timestep: x_t = (1 - sigma) x_0 + sigma eps, in the wider of
        float32 and the latents' dtype."""
        return rectified_flow.interpolate(latents, noise, self._sigma(timestep))

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """The velocity eps - x_0 that the predictor learns from latents and noise."""
        return rectified_flow.velocity(latents, noise)

    def loss_weight(self, timestep: Tensor) -> Tensor:
        """Loss weights [B] float32 of samples at these timesteps: factors of their squared errors.

        gaussian: w_i = (y_i - min y) N / sum(y - min y), y_i = exp(-2 ((t_i - N/2) / N)^2), over all levels,
        independent of the boundaries; between levels the same curve. Its mean over the levels is 1.

        min_snr (Hang et al. 2023, https://arxiv.org/abs/2303.09556) weights the error of x_0 with
        min(SNR, gamma). Here SNR = ((1 - sigma) / sigma)^2, and since x_0 = x_t - sigma v, the error of x_0
        is sigma^2 times the error of v: w = sigma^2 min(SNR, gamma) = min((1 - sigma)^2, gamma sigma^2).
        """
        timestep = timestep.float()
        if self.config.loss_weighting == "none":
            return torch.ones_like(timestep)
        sigma = self._sigma(timestep)
        if self.config.loss_weighting == "min_snr":
            return torch.minimum((1 - sigma) ** 2, self.config.min_snr_gamma * sigma**2)
        # y - y_0 = y_0 (exp(2 (sigma_0 - sigma) (sigma_0 + sigma - 1)) - 1). The plain difference would lose
        # half of float32's digits.
        lowest, factor = self._gaussian
        return (factor * torch.expm1(2 * (lowest - sigma) * (lowest + sigma - 1))).clamp(min=0)

    def model_timestep(self, timestep: Tensor) -> Tensor:
        """The timestep that Wan's transformer receives: the scheduler's, unchanged."""
        return timestep

    # -- sampling ----------------------------------------------------------------------------------

    @cached_property
    def solver(self) -> solvers.Solver:
        """The sampler for Wan: from the scheduler folder, or as published.

        Raises:
            CheckpointError: the scheduler folder cannot sample Wan.
        """
        config = self.config
        if config.from_pretrained is None:
            shift = config.shift if config.sample_shift is None else config.sample_shift
            name = config.solver or "unipc"
            return solvers.published(name, config.solver_order, shift, self.num_train_timesteps)
        return solvers.from_folder(
            Path(config.from_pretrained),
            config.solver,
            config.solver_order,
            config.sample_shift,
            self.num_train_timesteps,
        )

    def missing_files(self) -> list[str]:
        """The file of Wan's scheduler folder, if the folder is set and the file does not exist."""
        if self.config.from_pretrained is None:
            return []
        path = Path(self.config.from_pretrained) / solvers.FILE
        return [] if path.is_file() else [str(path)]

    def sigmas(self, steps: int) -> Tensor:
        """Noise levels [steps+1] float32 on CPU used for sampling a clip: Diffusers' own. They start just
        below 1 for UniPC and DPM-Solver++, and end at 0.

        Raises:
            ContractError: steps is below 1.
        """
        return self.solver.sigmas(steps)

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Samples clean latents [B,C,T,H,W] float32 from noise with Wan's sampler: see `Solver.integrate`."""
        return self.solver.integrate(velocity, noise, steps)

    # -- levels ------------------------------------------------------------------------------------

    def _sigma(self, timestep: Tensor) -> Tensor:
        return timestep / self.num_train_timesteps

    def _between(self, low: float, high: float | None) -> tuple[int, int]:
        """First and end index of the drawn levels with low <= t < high."""
        first = int((self._timesteps < low).sum())
        stop = self.num_train_timesteps if high is None else int((self._timesteps < high).sum())
        return max(first, self._first), min(stop, self._stop)

    def _check_mass(self, what: str = "the boundaries") -> None:
        if self._first >= self._stop or not self._cdf[self._stop] > self._cdf[self._first]:
            drawn = f"{float(self._timesteps[0]):g} to {float(self._timesteps[-1]):g}"
            raise ContractError(
                f"training never draws a timestep within {what} (timesteps: {self.config.timesteps})",
                where="scheduler",
                hint=f"the schedule's timesteps range from {drawn}",
            )


def _levels(config: WanFlowMatchConfig) -> Tensor:
    """Noise levels sigma[N] float64, descending."""
    count = config.num_train_timesteps
    points = count + 1 if config.extra_one_step else count
    u = torch.linspace(config.sigma_max, config.sigma_min, points, dtype=torch.float64, device="cpu")
    return rectified_flow.shift_sigma(u[:count], config.shift)


def _gaussian_constants(sigmas: Tensor) -> tuple[float, float]:
    """Constants of the Gaussian weights for sigma[N]: the sigma_0 with the lowest y, and y_0 N / sum(y -
    y_0), which is 0 if all y are equal."""
    y = torch.exp(-2 * (sigmas - 0.5) ** 2)
    lowest = y.argmin()
    total = float((y - y[lowest]).sum())
    return float(sigmas[lowest]), float(y[lowest]) * len(sigmas) / total if total > 1e-9 else 0.0


def _density_cdf(config: WanFlowMatchConfig) -> Tensor:
    """Cumulative density [N+1] float64 at the borders k / N of the levels, before the shift."""
    v = torch.linspace(0, 1, config.num_train_timesteps + 1, dtype=torch.float64, device="cpu")
    if config.timesteps == "logit_normal":  # SD3, eq. 19
        share: Tensor = torch.special.ndtr((torch.logit(v) - config.logit_mean) / config.logit_std)
        return share
    if config.timesteps == "mode":
        return _mode_cdf(v, config.mode_scale)
    if config.timesteps == "beta":
        return _beta_cdf(v, config.beta_alpha, config.beta_beta)
    return v


def _mode_cdf(v: Tensor, scale: float) -> Tensor:
    """Cumulative density at v of t = f(u) = 1 - u - s (cos^2(pi u / 2) - 1 + u), u uniform (SD3, eq. 20).

    f falls from 1 to 0 for s in [-1, 2 / (pi - 2)], so the result is 1 - u at f(u) = v, found by bisection.
    """
    low, high = torch.zeros_like(v), torch.ones_like(v)
    for _ in range(54):  # each iteration gives one bit of a float64
        u = (low + high) / 2
        above = 1 - u - scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u) > v
        low, high = torch.where(above, u, low), torch.where(above, high, u)
    share = 1 - (low + high) / 2
    share[0], share[-1] = 0, 1
    return share


def _beta_cdf(v: Tensor, a: float, b: float) -> Tensor:
    """The regularised incomplete beta function I_v(a, b), float64, v in [0, 1]."""
    swap = v > (a + 1) / (a + b + 2)  # the fraction converges fast below this; I_v(a, b) = 1 - I_(1-v)(b, a)
    below = _beta_fraction(torch.where(swap, 0, v), a, b)
    above = _beta_fraction(torch.where(swap, 1 - v, 0), b, a)
    return torch.where(swap, 1 - above, below)


def _beta_fraction(x: Tensor, a: float, b: float) -> Tensor:
    """I_x(a, b) by its continued fraction (https://dlmf.nist.gov/8.17.E22), evaluated from its end."""
    terms = 400  # ample for a and b up to 100
    fraction = torch.ones_like(x)
    for n in range(terms, 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + d * x / fraction
    log_front = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    front = torch.exp(log_front + torch.special.xlogy(a, x) + b * torch.log1p(-x))
    return front / fraction
