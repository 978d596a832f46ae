"""The optimizer and the learning-rate schedule that a config names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mm_core.config.sections import RunConfig
from mm_core.contracts import LRSchedule
from mm_core.optim.parameter_groups import groups_of
from mm_core.plugin.checks.values import returned


def make_optimizer(config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a training run, for the parameters that the engine trains."""
    optimizer: torch.optim.Optimizer = config.registry.build(
        "optimizer", config.optimizer, groups_of(parameters, config.train)
    )
    return optimizer


def make_lr_schedule(config: RunConfig, steps: int, base_lr: float) -> LRSchedule:
    """The learning-rate schedule of a training run.

    Args:
        config: the run's config.
        steps: steps of the whole run.
        base_lr: the learning rate that the factors multiply.

    Raises:
        ContractError: it returns something else than a number for the first, a middle or the last step.
    """
    schedule: LRSchedule = config.registry.build("lr_schedule", config.lr_schedule, steps, base_lr)
    for step in (0, steps // 2, steps - 1) if steps else ():
        returned(LRSchedule.factor, schedule.factor(step), schedule)
    return schedule
