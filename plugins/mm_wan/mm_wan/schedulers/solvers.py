"""Sampling with Diffusers' own solvers, set up as in a Wan pipeline's scheduler folder.

UniPC: https://arxiv.org/abs/2302.04867. DPM-Solver++: https://arxiv.org/abs/2211.01095.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from mm_core.contracts import VelocityField
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_wan.schedulers.config import SolverName

FILE = "scheduler_config.json"

Scheduler: TypeAlias = UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler | DPMSolverMultistepScheduler

_CLASSES: Mapping[SolverName, type[Scheduler]] = {
    "unipc": UniPCMultistepScheduler,
    "euler": FlowMatchEulerDiscreteScheduler,
    "dpm++": DPMSolverMultistepScheduler,
}

_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
"""What makes Diffusers' UniPC and DPM-Solver++ integrate a velocity."""


@dataclass(frozen=True)
class Solver:
    """A solver's class in Diffusers and its settings. It holds no state: each use makes the class anew."""

    name: SolverName
    settings: Mapping[str, object]

    def sigmas(self, steps: int) -> Tensor:
        """sigmas[steps+1] float32 on CPU, falling to 0, that `integrate` visits."""
        sigmas: Tensor = self._begin(steps, torch.device("cpu")).sigmas
        return sigmas.clone()

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Clean latents[B,C,T,H,W] float32 from noise[B,C,T,H,W], as WanPipeline's loop computes them.

        `velocity` is given float32 latents and the timestep that the pipeline passes, on the CPU: int64 [B]
        for UniPC and DPM-Solver++ (1000 sigma, its fraction cut off), float32 [B] for Euler.

        Raises:
            ContractError: steps below 1.
        """
        scheduler = self._begin(steps, noise.device)
        scheduler.set_begin_index(0)
        latents = noise.float()
        # Fetched once, so that nobody who looks at a timestep waits for the device.
        for timestep, known in zip(scheduler.timesteps, scheduler.timesteps.cpu(), strict=True):
            # Euler's step would lower the latents to the dtype of the velocity.
            predicted = velocity(latents, known.expand(len(latents))).float()
            (latents,) = scheduler.step(predicted, timestep, latents, return_dict=False)
        return latents

    def _begin(self, steps: int, device: torch.device) -> Scheduler:
        if steps < 1:
            raise ContractError(f"sampling takes at least one step, not {steps}", where="steps")
        with torch.device("cpu"):  # the tables stay there, also while models are built on meta
            scheduler = _CLASSES[self.name].from_config(dict(self.settings))
        scheduler.set_timesteps(steps, device=device)
        return scheduler


def published(name: SolverName, order: int | None, shift: float, num_train_timesteps: int) -> Solver:
    """The settings that Wan's pipelines are published with: UniPC of order 2 in flow mode, all else as
    Diffusers has it. Its shift is 3 for 480p and 5 for 720p (the example in Diffusers 0.42's
    pipelines/wan/pipeline_wan.py; https://huggingface.co/docs/diffusers/api/pipelines/wan)."""
    settings: dict[str, object] = {"num_train_timesteps": num_train_timesteps}
    if name == "euler":
        settings["shift"] = shift
    else:
        settings |= {**_FLOW, "flow_shift": shift, "solver_order": 2 if order is None else order}
    return Solver(name, settings)


def from_folder(
    folder: Path,
    name: SolverName | None,
    order: int | None,
    shift: float | None,
    num_train_timesteps: int,
) -> Solver:
    """The settings of a pipeline's scheduler folder, with `order` and `shift` in the place of its own where
    they are set.

    Raises:
        CheckpointError: no scheduler_config.json, or one of a scheduler that cannot sample Wan.
        ConfigError: a scheduler of another class than `name`, or of other timesteps.
    """
    settings = _read(folder)
    class_name = settings.get("_class_name")
    found = next((solver for solver, cls in _CLASSES.items() if cls.__name__ == class_name), None)
    if found is None:
        raise CheckpointError(
            f"the scheduler is of class {class_name!r}, which cannot sample Wan",
            where=str(folder / FILE),
            accepted=", ".join(cls.__name__ for cls in _CLASSES.values()),
        )
    if name is not None and name != found:
        raise ConfigError(
            f"solver is {name}, but the folder's scheduler is a {class_name} ({found})",
            where=str(folder / FILE),
            hint="leave out solver, or from_pretrained",
        )
    if found == "euler" and order not in (None, 1):
        raise ConfigError(
            f"solver_order is {order}, but the folder's scheduler is Euler's, of the first order",
            where=str(folder / FILE),
            hint="leave solver_order out",
        )
    _check(folder, found, settings, num_train_timesteps)
    if order is not None and found != "euler":
        settings["solver_order"] = order
    if shift is not None:
        settings["shift" if found == "euler" else "flow_shift"] = shift
    return Solver(found, settings)


def _check(folder: Path, name: SolverName, settings: Mapping[str, object], num_train_timesteps: int) -> None:
    """CheckpointError or ConfigError for the first setting that integrates something else, or at random."""
    where = str(folder / FILE)
    needed: dict[str, object] = {"use_dynamic_shifting": False}
    if name == "euler":
        needed |= {"stochastic_sampling": False, "invert_sigmas": False}
    else:
        needed |= _FLOW
    defaults = dict(_CLASSES[name]().config)
    for key, value in needed.items():
        if (found := settings.get(key, defaults.get(key, value))) != value:
            raise CheckpointError(
                f"{key} is {found!r}, so the scheduler does not integrate Wan's velocity from noise alone",
                where=where,
                accepted=repr(value),
            )
    if str(settings.get("algorithm_type", "")).startswith("sde"):
        raise CheckpointError(
            f"algorithm_type is {settings['algorithm_type']!r}, which draws noise in each step",
            where=where,
            accepted="dpmsolver++",
        )
    if (count := settings.get("num_train_timesteps", 1000)) != num_train_timesteps:
        raise ConfigError(
            f"num_train_timesteps is {num_train_timesteps}, but the folder's scheduler has {count}",
            where=where,
        )


def _read(folder: Path) -> dict[str, object]:
    """The settings in the folder's scheduler_config.json."""
    path = folder / FILE
    if not path.is_file():
        inside = folder / "scheduler"
        raise CheckpointError(
            f"there is no {FILE}",
            where=str(folder),
            accepted="the scheduler folder of a Diffusers pipeline",
            hint=f"did you mean {inside}?" if (inside / FILE).is_file() else None,
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"the scheduler's settings cannot be read: {fault}", where=str(path)) from fault
    if not isinstance(settings, dict):
        raise CheckpointError("the scheduler's settings are no mapping", where=str(path))
    return settings
