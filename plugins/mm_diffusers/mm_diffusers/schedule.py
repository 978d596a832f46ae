"""The noise scheduler `diffusers/schedule`: flow matching, sampled as the pipeline samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import VelocityField
from mm_core.diffusion import rectified_flow
from mm_core.errors import ContractError
from mm_diffusers.call import PipelineCall, empty_model
from mm_diffusers.config import ScheduleConfig
from mm_diffusers.folder import PipelineFolder
from mm_diffusers.transformer import packed

STEPS = 1000


class PipelineSchedule(ScheduleConfig):
    """Levels of noise of a pipeline's model. Satisfies `NoiseScheduler` and `SupportsForTokens`.

    timestep = 1000 sigma, float32. The arguments are the fields of `ScheduleConfig`.
    """

    tokens: int = 4096

    def for_tokens(self, tokens: int) -> PipelineSchedule:
        """This scheduler for samples of this many tokens."""
        found = replace(self)
        object.__setattr__(found, "tokens", tokens)
        found.__dict__["_call"] = self._call
        return found

    @cached_property
    def _call(self) -> PipelineCall:
        folder = PipelineFolder(Path(str(self.from_pretrained)), self.family)
        return PipelineCall(folder, empty_model(folder, "transformer"))

    def _scheduled(self, steps: int) -> tuple[Any, Any]:
        """The pipeline's scheduler, set for `steps` steps, and what it was set by."""
        call = self._call
        family, config = call.family, call.folder.config("transformer")
        shapes = family.condition_shapes(config)
        conditions = {name: torch.zeros(1, *(size or 1 for size in shape)) for name, shape in shapes.items()}
        given = family.arguments(
            config,
            torch.zeros(1, 1, family.text_width(config)),
            torch.ones(1, 1, dtype=torch.bool),
            conditions,
        )
        t, h, w = family.patch
        latents = torch.zeros(1, int(config["in_channels"]) // family.channels, t, h, w * self.tokens)
        given |= call.sizes(latents.shape)
        scheduler, noted = call.schedule(packed(latents, family), given, steps)
        if not scheduler.sigmas.isfinite().all():  # with a terminal shift, of one step
            raise ContractError(
                f"the scheduler of {call.folder.kind} has no levels of noise for steps {steps}",
                where="task.sample.steps",
                accepted=f"{steps + 1} or more",
            )
        return scheduler, noted

    @cached_property
    def _shift(self) -> float:
        if self.shift != "sampling":
            return float(self.shift)
        with torch.device("cpu"):  # where a task is built on meta, levels have values all the same
            scheduler, noted = self._scheduled(STEPS)
        config = scheduler.config
        if not config.get("use_dynamic_shifting"):
            return float(config.get("shift", 1.0))
        mu = float(noted["mu"])
        return math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu

    # -- training ----------------------------------------------------------------------------------

    def sample_timesteps(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Times of training [B] float32, row i with generators[i]."""
        if self.timesteps == "uniform":
            u = rectified_flow.uniform(generators)
        else:
            u = rectified_flow.logit_normal(generators, self.logit_mean, self.logit_std)
        return STEPS * rectified_flow.shift_sigma(u, self._shift)

    def timestep_quantile(self, u: Tensor) -> Tensor:
        """Quantiles of the times of training [B] float32."""
        u = u.double()
        if self.timesteps == "logit_normal":
            u = rectified_flow.logit_normal_quantile(u, self.logit_mean, self.logit_std)
        return (STEPS * rectified_flow.shift_sigma(u, self._shift)).float()

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """x_t = (1 - sigma) x_0 + sigma eps."""
        return rectified_flow.interpolate(latents, noise, timestep / STEPS)

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """The velocity eps - x_0."""
        return rectified_flow.velocity(latents, noise)

    def loss_weight(self, timestep: Tensor) -> Tensor:
        """1: the density of the times weights them."""
        return torch.ones_like(timestep, dtype=torch.float32)

    def model_timestep(self, timestep: Tensor) -> Tensor:
        """Unchanged: the pipeline converts it."""
        return timestep

    # -- sampling ----------------------------------------------------------------------------------

    def sigmas(self, steps: int) -> Tensor:
        """The pipeline's levels [steps+1] float32."""
        found: Tensor = self._scheduled(steps)[0].sigmas.float().cpu()
        return found

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Clean latents by the pipeline's solver."""
        scheduler, _ = self._scheduled(steps)
        latents = noise.float()
        for t in scheduler.timesteps:
            time = t.float().to(latents.device).expand(len(latents))
            latents = scheduler.step(velocity(latents, time).float(), t, latents, return_dict=False)[0]
        return latents
