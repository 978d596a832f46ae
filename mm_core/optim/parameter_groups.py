"""Which parameters are trained, and which of them otherwise than the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mm_core.config.sections import ParameterGroup, TrainSection
from mm_core.errors import PlanError
from mm_core.modules.patterns import select_parameters

Group = dict[str, Any]
"""What torch's optimizers take: `params`, here with their `names`, and settings of their own."""


def groups_of(parameters: Mapping[str, nn.Parameter], train: TrainSection) -> list[Group]:
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
        own = [name for name in select_parameters(section.match, parameters, key) if name not in owners]
        if not own:
            raise PlanError(
                "earlier groups have taken every parameter that this one matches",
                where=key,
                hint="the first group that matches a parameter counts: put the narrower group first",
            )
        owners |= dict.fromkeys(own, index)
    groups: dict[tuple[int, bool], Group] = {}
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
