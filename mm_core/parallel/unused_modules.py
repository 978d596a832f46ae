"""Sharded modules that have not run yet, such as an expert that no step has trained.

In a backward that does not reduce gradients, torch (2.7 to 2.13) raises for a module that was never gathered:
it looks for the gradients of parameters that it has not made yet. One that reduces passes over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class UnusedModules:
    """Those of `modules` that have never run."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {module for module in modules if isinstance(module, FSDPModule)}
        for module in self._modules:
            module.register_forward_pre_hook(self._ran)

    def _ran(self, module: Any, _: object) -> None:
        self._modules.discard(module)

    def exempt_from_sync(self) -> None:
        """Between a forward and a backward that does not reduce gradients: these may, having none."""
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
