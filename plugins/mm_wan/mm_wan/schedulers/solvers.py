"""Samplers for Wan: Diffusers' own solvers, configured as in a Wan pipeline's scheduler folder.

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
"""Settings with which Diffusers' UniPC and DPM-Solver++ integrate a velocity."""


@dataclass(frozen=True)
class Solver:
    """A sampler for Wan: a Diffusers class and its settings. Stateless: each use creates a new instance."""

    name: SolverName
    settings: Mapping[str, object]

    def sigmas(self, steps: int) -> Tensor:
        """Noise levels [steps+1] float32 on CPU, descending to 0, that the sampler uses for a clip."""
        sigmas: Tensor = self._begin(steps, torch.device("cpu")).sigmas
        return sigmas.clone()

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Samples clean latents [B,C,T,H,W] float32 from noise, as the loop of Diffusers' WanPipeline does.

        Args:
            velocity: predicts the velocity from float32 latents and the pipeline's timestep on the CPU: int64
                [B] for UniPC and DPM-Solver++ (1000 sigma without its fraction), float32 [B] for Euler.
            noise: [B,C,T,H,W].
            steps: number of sampling steps.

        Raises:
            ContractError: steps is below 1.
        """
        scheduler = self._begin(steps, noise.device)
        scheduler.set_begin_index(0)
        latents = noise.float()
        # Copied to the CPU once, so that reading a timestep does not wait for the device.
        for timestep, known in zip(scheduler.timesteps, scheduler.timesteps.cpu(), strict=True):
            # Without float(), Euler's step would cast the latents to the velocity's dtype.
            predicted = velocity(latents, known.expand(len(latents))).float()
            (latents,) = scheduler.step(predicted, timestep, latents, return_dict=False)
        return latents

    def _begin(self, steps: int, device: torch.device) -> Scheduler:
        if steps < 1:
            raise ContractError(
                f"sampling needs at least one step, not {steps}", where="steps", accepted="1 or more"
            )
        with torch.device("cpu"):  # the tables are on the CPU even while models are built on meta
            scheduler = _CLASSES[self.name].from_config(dict(self.settings))
        scheduler.set_timesteps(steps, device=device)
        return scheduler


def published(name: SolverName, order: int | None, shift: float, num_train_timesteps: int) -> Solver:
    """The sampler with the settings of Wan's published pipelines: UniPC of order 2 in flow mode, otherwise
    Diffusers' defaults. The published shift is 3 for 480p and 5 for 720p (example in Diffusers 0.42's
    pipelines/wan/pipeline_wan.py; https://huggingface.co/docs/diffusers/api/pipelines/wan).

    Args:
        name: name of the solver.
        order: order of the solver; None: 2.
        shift: shift of the noise levels.
        num_train_timesteps: number of noise levels.
    """
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
    """The sampler described by a Wan pipeline's scheduler folder.

    Args:
        folder: scheduler folder of the pipeline.
        name: expected solver; None: any.
        order: order of the solver; None: the folder's.
        shift: shift of the noise levels; None: the folder's.
        num_train_timesteps: number of noise levels used in training.

    Raises:
        CheckpointError: scheduler_config.json is missing, or its scheduler cannot sample Wan.
        ConfigError: the scheduler's class differs from `name`, or its number of timesteps from training.
    """
    settings = _read(folder)
    class_name = settings.get("_class_name")
    found = next((solver for solver, cls in _CLASSES.items() if cls.__name__ == class_name), None)
    if found is None:
        raise CheckpointError(
            f"the scheduler has class {class_name!r}, which cannot sample Wan",
            where=str(folder / FILE),
            accepted=", ".join(cls.__name__ for cls in _CLASSES.values()),
        )
    if name is not None and name != found:
        raise ConfigError(
            f"solver is {name}, but the folder's scheduler is a {class_name} ({found})",
            where=str(folder / FILE),
            hint="leave out either solver or from_pretrained",
        )
    if found == "euler" and order not in (None, 1):
        raise ConfigError(
            f"solver_order is {order}, but the folder's scheduler is Euler's, which has order 1",
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
    """Raises CheckpointError or ConfigError for the first setting that does not integrate Wan's velocity,
    or adds random noise."""
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
                f"{key} is {found!r}, which does not work for Wan",
                where=where,
                accepted=repr(value),
            )
    if str(settings.get("algorithm_type", "")).startswith("sde"):
        raise CheckpointError(
            f"algorithm_type is {settings['algorithm_type']!r}, which adds random noise in each step",
            where=where,
            accepted="dpmsolver++",
        )
    if (count := settings.get("num_train_timesteps", 1000)) != num_train_timesteps:
        raise ConfigError(
            f"num_train_timesteps is {num_train_timesteps}, but the folder's scheduler has {count}",
            where=where,
            hint="set num_train_timesteps to the scheduler's",
        )


def _read(folder: Path) -> dict[str, object]:
    """Settings from the folder's scheduler_config.json."""
    path = folder / FILE
    if not path.is_file():
        inside = folder / "scheduler"
        raise CheckpointError(
            f"this folder holds no {FILE}",
            where=str(folder),
            accepted="the scheduler folder of a Diffusers pipeline",
            hint=f"did you mean {inside}?" if (inside / FILE).is_file() else None,
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"the scheduler's settings cannot be read: {fault}",
            where=str(path),
            hint="copy the file again from where the weights came from, or choose another folder",
        ) from fault
    if not isinstance(settings, dict):
        raise CheckpointError(
            "the scheduler's settings are not a mapping",
            where=str(path),
            accepted="a JSON object of settings",
        )
    return settings
