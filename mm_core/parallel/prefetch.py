"""Prefetching of sharded modules: which are gathered while another one computes."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from mm_core.contracts import TaskModule
from mm_core.parallel.layout import ShardedPlan


def set_prefetch(task: TaskModule, plan: ShardedPlan) -> None:
    """Sets a plan's prefetching on the sharded modules of a task."""

    def sharded(path: str) -> FSDPModule:
        module = task.get_submodule(path)
        assert isinstance(module, FSDPModule)
        return module

    for path, ahead in plan.forward_prefetch.items():
        sharded(path).set_modules_to_forward_prefetch([sharded(other) for other in ahead])
    for path, ahead in plan.backward_prefetch.items():
        sharded(path).set_modules_to_backward_prefetch([sharded(other) for other in ahead])
