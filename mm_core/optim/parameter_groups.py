"""Parameter groups of an optimizer: trained parameters with their own learning rate or weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mm_core.config.sections import ParameterGroup, TrainSection
from mm_core.errors import PlanError
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.patterns import select_parameters

Group = dict[str, Any]
"""A group for torch's optimizers: `params`, here with their `names`, and the group's own settings."""


def groups_of(parameters: Mapping[str, nn.Parameter], train: TrainSection) -> list[Group]:
    """The parameter groups for an optimizer; parameters without a group in the config come first.

    Args:
        parameters: trained parameters (plain tensors or DTensors), by path in the task.
        train: the config's section; the first of its groups that matches a parameter applies.

    Returns:
        `{"params": [...], "names": [...]}` each, with `lr_scale` if a group in the config or an adapter
        (`b_lr_scale`) sets it, and `weight_decay` if one sets it or if norms and biases have none.

    Raises:
        PlanError: nothing is trained, a pattern matches no trained parameter, or earlier groups leave a group
            empty.
    """
    if not parameters and train.adapters:
        raise PlanError(
            "no parameter is trained: the files of this run's adapters only add to the base (diff)",
            where="train.adapters",
            hint="add an adapter with targets, or name modules in train.also_train",
        )
    owners: dict[str, int] = {}
    for index, section in enumerate(train.parameter_groups):
        key = f"train.parameter_groups.{index}.match"
        own = [name for name in select_parameters(section.match, parameters, key) if name not in owners]
        if not own:
            raise PlanError(
                "earlier groups already contain every parameter that this one matches",
                where=key,
                hint="put the narrower group first: the first group that matches a parameter applies",
            )
        owners |= dict.fromkeys(own, index)
    factors = {adapter.name: adapter.b_lr_scale for adapter in train.adapters}
    groups: dict[tuple[int, bool, float], Group] = {}
    # Parameters without a group in the config have the index -1, which sorts first.
    for name in sorted(parameters, key=lambda name: owners.get(name, -1)):
        index = owners.get(name, -1)
        owner = train.parameter_groups[index] if index >= 0 else None
        spared = parameters[name].dim() < 2 and not train.decay_norms_and_biases
        spared = spared and (owner is None or owner.weight_decay is None)
        place = adapter_of(name)
        factor = factors.get(place[2], 1.0) if place is not None and place[1] == "lora_B" else 1.0
        empty: Group = {"params": [], "names": [], **_settings(owner, spared, factor)}
        group = groups.setdefault((index, spared, factor), empty)
        group["params"].append(parameters[name])
        group["names"].append(name)
    return list(groups.values())


def _settings(section: ParameterGroup | None, spared: bool, factor: float) -> dict[str, float]:
    """The group's settings that differ from the optimizer's; `factor` multiplies the learning rate."""
    found = {"weight_decay": 0.0} if spared else {}
    if section is not None or factor != 1:
        found["lr_scale"] = factor * (section.lr_scale if section is not None else 1.0)
    if section is not None and section.weight_decay is not None:
        found["weight_decay"] = section.weight_decay
    return found
