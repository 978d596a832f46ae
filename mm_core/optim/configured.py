"""The optimizer and the learning-rate schedule that a config names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mm_core.config.sections import TrainSection
from mm_core.contracts import LRSchedule
from mm_core.optim.parameter_groups import groups_of
from mm_core.plugin.checks.values import returned
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig


def make_optimizer(
    registry: Registry, named: ComponentConfig, train: TrainSection, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that the config names, for the parameters that the engine trains."""
    made: torch.optim.Optimizer = registry.build("optimizer", named, groups_of(parameters, train))
    return made


def make_lr_schedule(registry: Registry, named: ComponentConfig, steps: int, base_lr: float) -> LRSchedule:
    """The learning-rate schedule of a training run.

    Args:
        registry: builds the schedule.
        named: the config's `lr_schedule`.
        steps: steps of the whole run.
        base_lr: the learning rate that the factors multiply.

    Raises:
        ContractError: it returns something else than a number for the first, a middle or the last step.
    """
    schedule: LRSchedule = registry.build("lr_schedule", named, steps, base_lr)
    for step in (0, steps // 2, steps - 1) if steps else ():
        returned(LRSchedule.factor, schedule.factor(step), schedule)
    return schedule
