"""Which expert of a predictor a step trains, and which expert a timestep belongs to.

A run that trains one expert draws only the timesteps of that expert. A run that trains several draws one
expert for each step, from (seed, step), with a probability equal to the expert's share of all timesteps. The
expert is the same on every rank and in every micro-batch: ranks that call different sharded modules would
deadlock. Over many steps the timesteps are distributed as for one model trained on all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mm_core.contracts import (
    Expert,
    NoiseScheduler,
    Predictor,
    Randomness,
    SupportsExperts,
    SupportsForTokens,
    SupportsTruncated,
)
from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.values import returned
from mm_core.schema.fields import Guidance


class Experts:
    """The experts of a predictor; a predictor without experts has one, named None, for all timesteps.

    Args:
        predictor: the task's predictor.
        scheduler: the noise scheduler, for the timesteps of all experts.

    Raises:
        ContractError: the scheduler cannot be restricted to an expert's timesteps, or never draws them.
    """

    def __init__(self, predictor: Predictor | SupportsExperts, scheduler: NoiseScheduler) -> None:
        self.scheduler = self._whole = scheduler
        self._predictor = predictor
        self._by_tokens: dict[int, Experts] = {}
        self._routed = predictor if isinstance(predictor, SupportsExperts) else None
        self._experts = tuple(predictor.experts) if isinstance(predictor, SupportsExperts) else ()
        self._trained: list[tuple[Expert, NoiseScheduler, float]] = []
        if not self._experts:
            return
        if not isinstance(scheduler, SupportsTruncated):
            raise ContractError(
                f"the predictor has {plural(len(self._experts), 'expert')}, but a {type(scheduler).__name__} "
                "cannot draw the timesteps of one expert alone",
                where="task.scheduler",
                accepted="a scheduler with `truncated` and `mass`, such as wan/flow_match",
            )
        for expert in self._experts:
            if expert.trained:
                interval = (expert.low, expert.high)
                mass = returned(SupportsTruncated.mass, scheduler.mass(*interval), scheduler)
                self._trained.append((expert, scheduler.truncated(*interval), mass))
        if len(self._trained) == 1:
            self.scheduler = self._trained[0][1]

    def for_tokens(self, tokens: int) -> Experts:
        """These experts with the noise scheduler for samples of this many tokens.

        They are the same object if the noise levels do not depend on the number of tokens.
        """
        if not isinstance(self._whole, SupportsForTokens):
            return self
        if tokens not in self._by_tokens:
            scheduler = self._whole.for_tokens(tokens)
            self._by_tokens[tokens] = (
                self if scheduler is self._whole else Experts(self._predictor, scheduler)
            )
        return self._by_tokens[tokens]

    def of_step(self, rng: Randomness, step: int) -> tuple[str | None, NoiseScheduler]:
        """The expert that a training step trains, and the noise scheduler of its timesteps.

        Args:
            rng: the root of the run's randomness.
            step: from 0.
        """
        if not self._trained:
            return None, self.scheduler
        place = rng.uniform("expert", step) * sum(mass for *_, mass in self._trained)
        for expert, scheduler, mass in self._trained:
            if place < mass:
                return expert.name, scheduler
            place -= mass
        expert, scheduler, _ = self._trained[-1]  # rounding may leave `place` at the very end
        return expert.name, scheduler

    def trained_on(self, expert: str | None) -> NoiseScheduler:
        """The noise scheduler of the timesteps on which a trained expert is trained (None: no experts)."""
        return next((found for each, found, _ in self._trained if each.name == expert), self.scheduler)

    def of(self, timestep: Tensor) -> str | None:
        """The expert for a batch whose rows share one timestep [B] (pass a CPU tensor: no device sync)."""
        if not self._experts:
            return None
        t = float(timestep[0])
        return next(e.name for e in self._experts if e.low <= t and (e.high is None or t < e.high))

    def scales(self, guidance: Guidance, where: str = "guidance") -> dict[str | None, float]:
        """The guidance scale of each expert of the predictor.

        Raises:
            ContractError: `guidance` is a list whose length is not the number of experts.
        """
        names: list[str | None] = [expert.name for expert in self._experts] if self._experts else [None]
        given = [guidance] * len(names) if isinstance(guidance, int | float) else list(guidance)
        if len(given) != len(names):
            listed = ", then ".join(expert.name for expert in self._experts)
            raise ContractError(
                f"guidance lists {plural(len(given), 'scale')}, but the predictor has "
                f"{plural(len(self._experts), 'expert') if self._experts else 'no experts'}",
                where=where,
                accepted=f"a number, or one for each expert: {listed}" if listed else "a number",
            )
        return dict(zip(names, map(float, given), strict=True))

    def complete(self, device: torch.device) -> AbstractContextManager[None]:
        """A context in which all experts of the predictor are loaded, also those this run does not train."""
        return nullcontext() if self._routed is None else self._routed.complete(device)
