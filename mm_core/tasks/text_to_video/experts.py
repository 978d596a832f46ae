"""Which expert of a predictor a step trains, and which one a timestep belongs to.

A run that trains one expert trains the timesteps of that expert alone. One that trains several draws a step's
expert with the share that its timesteps have of all, from (seed, step): the same on every rank and in every
micro-batch, since ranks that call different sharded modules would wait for each other for ever. Over the
steps the timesteps then are distributed as for one model that is trained on all of them.
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
    SupportsTruncated,
)
from mm_core.errors import ContractError
from mm_core.schema.fields import Guidance


class Experts:
    """The experts of a predictor; a predictor without has one expert, called None, for all timesteps.

    scheduler: whose timesteps the run trains on the whole.

    Raises:
        ContractError: a scheduler that cannot be cut to an expert's timesteps, or never draws them.
    """

    def __init__(self, predictor: Predictor | SupportsExperts, scheduler: NoiseScheduler) -> None:
        self.scheduler = scheduler
        self._routed = predictor if isinstance(predictor, SupportsExperts) else None
        self._experts = tuple(predictor.experts) if isinstance(predictor, SupportsExperts) else ()
        self._trained: list[tuple[Expert, NoiseScheduler, float]] = []
        if not self._experts:
            return
        if not isinstance(scheduler, SupportsTruncated):
            raise ContractError(
                f"the predictor has {len(self._experts)} experts, and the timesteps of a "
                f"{type(scheduler).__name__} cannot be cut to those of one",
                where="task.scheduler",
                accepted="a scheduler with `truncated` and `mass`, such as wan/flow_match",
            )
        for expert in self._experts:
            if expert.trained:
                interval = (expert.low, expert.high)
                self._trained.append((expert, scheduler.truncated(*interval), scheduler.mass(*interval)))
        if len(self._trained) == 1:
            self.scheduler = self._trained[0][1]

    def of_step(self, rng: Randomness, step: int) -> tuple[str | None, NoiseScheduler]:
        """The expert that step `step` (from 0) trains, and the scheduler of its timesteps. `rng` is the
        run's root."""
        if not self._trained:
            return None, self.scheduler
        place = rng.uniform("expert", step) * sum(mass for *_, mass in self._trained)
        for expert, scheduler, mass in self._trained:
            if place < mass:
                return expert.name, scheduler
            place -= mass
        expert, scheduler, _ = self._trained[-1]  # a rounding beyond the end
        return expert.name, scheduler

    def of(self, timestep: Tensor) -> str | None:
        """The expert that a batch at one timestep[B] belongs to. On the CPU nothing is waited for."""
        if not self._experts:
            return None
        t = float(timestep[0])
        return next(e.name for e in self._experts if e.low <= t and (e.high is None or t < e.high))

    def scales(self, guidance: Guidance, where: str = "guidance") -> dict[str | None, float]:
        """The guidance scale of each expert. ContractError for a list of another length."""
        names: list[str | None] = [expert.name for expert in self._experts] if self._experts else [None]
        given = [guidance] * len(names) if isinstance(guidance, int | float) else list(guidance)
        if len(given) != len(names):
            listed = ", then ".join(expert.name for expert in self._experts)
            raise ContractError(
                f"guidance lists {len(given)} scale{'s' * (len(given) != 1)}, and the predictor has "
                f"{len(self._experts) or 'no'} experts",
                where=where,
                accepted=f"a number, or one for each expert: {listed}" if listed else "a number",
            )
        return dict(zip(names, map(float, given), strict=True))

    def complete(self, device: torch.device) -> AbstractContextManager[None]:
        """All experts are there for the length of the block, those that are not trained as well."""
        return nullcontext() if self._routed is None else self._routed.complete(device)
