"""Sharded modules that have not run yet, such as an expert that no step has trained.

In a backward that does not reduce gradients, torch (2.7 to 2.13) raises for a module that was never gathered:
it reads gradients of parameters that do not exist yet. A backward that reduces gradients skips such a module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class UnusedModules:
    """The sharded modules that have never run yet; a module leaves this set with its first forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {module for module in modules if isinstance(module, FSDPModule)}
        for module in self._modules:
            module.register_forward_pre_hook(self._ran)

    def _ran(self, module: Any, _: object) -> None:
        self._modules.discard(module)

    def exempt_from_sync(self) -> None:
        """Turns gradient synchronisation on for modules that never ran, before a backward without it.

        They have no gradients, so nothing is synchronised, and torch does not raise.
        """
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
