"""The noise scheduler `flow_match`: rectified flow with shifted timesteps and Euler sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mm_core.builtin.configs.diffusion import FlowMatchConfig
from mm_core.contracts import VelocityField
from mm_core.diffusion import rectified_flow
from mm_core.errors import ContractError, plural


class FlowMatch(FlowMatchConfig):
    """The noise scheduler `flow_match`: rectified flow (Liu et al. 2022; SD3, Esser et al. 2024).

    timestep = num_train_timesteps * sigma, in float32: in bfloat16, 998.7 would be 1000.
    The arguments are the fields of `FlowMatchConfig`, described there. Satisfies `NoiseScheduler` and
    `SupportsForTokens`. With `dynamic_shift`, its own methods take the shift of `base_tokens`.
    """

    def for_tokens(self, tokens: int) -> FlowMatch:
        """This noise scheduler with its shift for samples of this many tokens.

        The shift is exp(mu), or mu if `form` is linear; mu is linear in the tokens (FLUX; Diffusers'
        FlowMatchEulerDiscreteScheduler with use_dynamic_shifting).

        Raises:
            ContractError: a linear shift is not positive for so many tokens.
        """
        by = self.dynamic_shift
        if by is None:
            return self
        slope = (by.max_shift - by.base_shift) / (by.max_tokens - by.base_tokens)
        mu = by.base_shift + slope * (tokens - by.base_tokens)
        shift = math.exp(mu) if by.form == "exponential" else mu
        if shift <= 0:
            raise ContractError(
                f"dynamic_shift gives samples of {plural(tokens, 'token')} the shift {shift:g}",
                where="task.scheduler.dynamic_shift",
                accepted="a shift above 0",
                hint="set form: exponential, or raise the shift of the nearer end",
            )
        return replace(self, shift=shift, dynamic_shift=None)

    @property
    def _shift(self) -> float:
        by = self.dynamic_shift
        return self.shift if by is None else self.for_tokens(by.base_tokens).shift

    def sample_timesteps(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draws diffusion timesteps for training: [B] float32 on CPU, row i from generators[i]."""
        if self.timesteps == "uniform":
            u = rectified_flow.uniform(generators)
        else:
            u = rectified_flow.logit_normal(generators, self.logit_mean, self.logit_std)
        return self.num_train_timesteps * rectified_flow.shift_sigma(u, self._shift)

    def timestep_quantile(self, u: Tensor) -> Tensor:
        """The diffusion timestep below which a share u of the training timesteps lies: [B] float32."""
        u = u.double()
        if self.timesteps == "logit_normal":
            u = rectified_flow.logit_normal_quantile(u, self.logit_mean, self.logit_std)
        return (self.num_train_timesteps * rectified_flow.shift_sigma(u, self._shift)).float()

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Noisy latents x_t[B,C,T,H,W] at a diffusion timestep, in float32 or wider."""
        return rectified_flow.interpolate(latents, noise, timestep / self.num_train_timesteps)

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """The diffusion model's training target: the velocity eps - x_0."""
        return rectified_flow.velocity(latents, noise)

    def loss_weight(self, timestep: Tensor) -> Tensor:
        """Loss weight of diffusion timesteps: 1, since the density of the timesteps already weights them."""
        return torch.ones_like(timestep, dtype=torch.float32)

    def model_timestep(self, timestep: Tensor) -> Tensor:
        """The diffusion timestep in the model's units: unchanged."""
        return timestep

    def sigmas(self, steps: int) -> Tensor:
        """Noise levels of the sampler, [steps+1] float32 from 1 to 0, equally spaced before the shift."""
        u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return rectified_flow.shift_sigma(u, self._shift).float()

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Samples clean latents from noise by Euler's method, in float32."""

        def at(latents: Tensor, sigma: Tensor) -> Tensor:
            timestep = (self.num_train_timesteps * sigma).to(latents.device).expand(len(latents))
            return velocity(latents, timestep).float()

        # Step sizes stay on the CPU: as scalars they need no copy and no synchronisation.
        return rectified_flow.euler(at, noise.float(), self.sigmas(steps))
