"""Computing around a module's forward, from outside of the module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def around_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replaces a module's bound `forward` by `around(forward, *args, **kwargs)`.

    Parameter paths stay the same, and hooks (also those of fully_shard) run outside of it.
    """
    forward = module.forward

    @functools.wraps(forward)  # input casting reads the names of positions from the signature
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = replaced
