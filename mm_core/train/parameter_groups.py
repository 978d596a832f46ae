"""Which parameters are trained, and which of them otherwise than the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mm_core.config.schema import ParameterGroup, TrainSection
from mm_core.errors import PlanError
from mm_core.parallel.patterns import match


def groups_of(parameters: Mapping[str, nn.Parameter], train: TrainSection) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer's target; those of no group of the config come first.

    Args:
        parameters: what is trained (plain tensors or DTensors), by path in the task.
        train: the config's section; of its groups the first that matches a parameter counts.

    Returns:
        `{"params": [...], "names": [...]}` each, with `lr_scale` where a group of the config sets it, and
        `weight_decay` where one sets it or where norms and biases are not to decay.

    Raises:
        PlanError: a pattern that matches no trained parameter, or a group that earlier ones leave empty.
    """
    owners: dict[str, int] = {}
    for index, section in enumerate(train.parameter_groups):
        key = f"train.parameter_groups.{index}.match"
        own = [name for name in covered(section.match, parameters, key) if name not in owners]
        if not own:
            raise PlanError(
                "earlier groups have taken every parameter that this one matches",
                where=key,
                hint="the first group that matches a parameter counts: put the narrower group first",
            )
        owners |= dict.fromkeys(own, index)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    # Parameters of no group of the config have the index -1, which sorts first.
    for name in sorted(parameters, key=lambda name: owners.get(name, -1)):
        index = owners.get(name, -1)
        owner = train.parameter_groups[index] if index >= 0 else None
        spared = parameters[name].dim() < 2 and not train.decay_norms_and_biases
        spared = spared and (owner is None or owner.weight_decay is None)
        group = groups.setdefault((index, spared), {"params": [], "names": [], **_settings(owner, spared)})
        group["params"].append(parameters[name])
        group["names"].append(name)
    return list(groups.values())


def _settings(section: ParameterGroup | None, spared: bool) -> dict[str, float]:
    """What sets a group apart from the optimizer's own settings."""
    found = {"weight_decay": 0.0} if spared else {}
    if section is not None:
        found["lr_scale"] = section.lr_scale
        if section.weight_decay is not None:
            found["weight_decay"] = section.weight_decay
    return found


def freeze(task: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Takes the parameters that `patterns` cover out of training; returns their paths in the task.

    To be called on the task before the engine plans.

    Raises:
        PlanError: a pattern that matches nothing, or nothing left to train.
    """
    parameters = dict(task.named_parameters())
    names = covered(patterns, parameters, "train.freeze")
    for name in names:
        parameters[name].requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in parameters.values()):
        raise PlanError(
            "every parameter is frozen, so there is nothing to train",
            where="train.freeze",
            hint="leave some modules out of train.freeze",
        )
    return names


def covered(patterns: Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """The names of parameters that any pattern matches, by themselves or by a module above them.

    Raises PlanError, naming `key`, for a pattern that matches nothing.
    """
    names = list(names)
    paths = dict.fromkeys(path for name in names for path in (*above(name), name))
    found = set(match(patterns, paths, key)) if patterns else set()
    return [name for name in names if name in found or not found.isdisjoint(above(name))]


def above(name: str) -> list[str]:
    """The paths of the modules that hold `a.b.weight`: `a` and `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
