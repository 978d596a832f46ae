"""AdamW and Adam with the fastest kernel of the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import nn

from mm_core.optim.parameter_groups import Group

Kind = TypeVar("Kind", torch.optim.Adam, torch.optim.AdamW)


def adamw(
    groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """The AdamW optimizer over groups of plain tensors or DTensors, with the device's fastest kernel.

    On two gloo ranks with FSDP2 a step over 1M parameters took 1.6 ms fused, 2.8 ms foreach and 5.9 ms
    tensor by tensor (torch 2.13, one core per rank). Fused and foreach each round equally for any sharding.

    Reference: https://arxiv.org/abs/1711.05101

    Args:
        groups: parameter groups (`groups_of`); a group's own settings replace those below.
        lr: base learning rate, which the schedule's factors multiply.
        betas: decay of the first and the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: a step removes `lr` times this share of each parameter.
    """
    return _adam(torch.optim.AdamW, groups, lr, betas, eps, weight_decay)


def adam(
    groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Adam:
    """The Adam optimizer with L2 decay, else as `adamw`.

    Reference: https://arxiv.org/abs/1412.6980

    Args:
        groups: parameter groups (`groups_of`); a group's own settings replace those below.
        lr: base learning rate, which the schedule's factors multiply.
        betas: decay of the first and the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: this share of each parameter is added to its gradient.
    """
    return _adam(torch.optim.Adam, groups, lr, betas, eps, weight_decay)


def _adam(
    kind: type[Kind],
    groups: Sequence[Group],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Kind:
    held = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in held}
    fused = bool(held) and all(p.is_floating_point() for p in held) and all(map(has_fused_adamw, devices))
    first, second = betas  # a YAML gives a list
    return kind(
        [dict(group) for group in groups],
        lr=lr,
        betas=(first, second),
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
        foreach=not fused,
    )


@cache
def has_fused_adamw(device_type: str) -> bool:
    """Whether a device has the fused kernel of the AdamW optimizer, found by one step on two numbers.

    torch's own list of devices includes third-party backends without checking them.
    """
    if device_type == "meta":
        return False
    probe = nn.Parameter(torch.ones(2, device=device_type))
    probe.grad = torch.ones_like(probe)
    try:
        torch.optim.AdamW([probe], lr=0.5, weight_decay=0.0, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return bool(torch.allclose(probe.detach().cpu(), torch.full((2,), 0.5), atol=1e-4))
