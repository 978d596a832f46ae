"""Gradient averaging on gloo, in all supported torch versions.

fully_shard reduces fp32 and bf16 gradients by ReduceOp.AVG. In torch 2.7 gloo's reduce-scatter accepts AVG
but silently returns the SUM (gradients too large by the number of ranks), and its all-reduce raises. Summing
and dividing separately is right everywhere: newer versions have a setting for it; 2.7 divides separately only
for a device named `mtia`, so that name is passed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.fsdp import FSDPModule

from mm_core.device.torch_private import divide_apart
from mm_core.errors import PlanError

_SETTING = "set_force_sum_reduction_for_comms"


def average_by_sum(device: torch.device, modules: Iterable[FSDPModule]) -> None:
    """Makes sharded modules average gradients on CPU (gloo) by a sum and a division; others keep AVG."""
    if device.type != "cpu":
        return
    for module in modules:
        if hasattr(module, _SETTING):
            getattr(module, _SETTING)(True)
        else:
            divide_apart()


def check_replicas(device: torch.device, replicas: int) -> None:
    """Checks that this torch can keep replicas of sharded modules on the device.

    Raises:
        PlanError: torch 2.7 on CPU cannot (an assertion inside fully_shard).
    """
    if device.type == "cpu" and replicas > 1 and not hasattr(FSDPModule, _SETTING):
        raise PlanError(
            f"torch {torch.__version__} cannot keep replicas on CPU",
            where="engine.sharding_size",
            accepted="auto (one shard per rank)",
            hint="set engine.sharding_size: auto; replicas on CPU need torch 2.8 or newer",
        )
