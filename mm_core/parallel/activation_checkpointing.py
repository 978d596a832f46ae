"""Recomputation of activations (activation checkpointing), applied to modules from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recompute(module: nn.Module, use_reentrant: bool, contexts: Callable[[], Contexts] | None = None) -> None:
    """Makes a module keep only its inputs, and recompute its forward (activations) in the backward.

    The bound `forward` is replaced, so parameter paths stay the same, and hooks (also those of fully_shard)
    are not run again.

    Args:
        module: changes in place.
        use_reentrant: the older autograd path.
        contexts: called at each forward, for the contexts of it and of its recomputation; the older path
            has none.
    """
    more: Any = {} if contexts is None or use_reentrant else {"context_fn": contexts}
    forward = module.forward

    @functools.wraps(forward)  # input casting reads the names of positions from the signature
    def recomputed(*args: object, **kwargs: object) -> object:
        names, values = tuple(kwargs), tuple(kwargs.values())

        def run(_: torch.Tensor, *flat: object) -> object:
            # Keywords are passed as positions: the reentrant form tracks gradients of positions only.
            split = len(flat) - len(names)
            return forward(*flat[:split], **dict(zip(names, flat[split:], strict=True)))

        # Without an input that requires a gradient, the reentrant form would drop the parameters'.
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        return checkpoint(run, anchor, *args, *values, use_reentrant=use_reentrant, **more)

    replacement: Callable[..., object] = recomputed
    module.forward = replacement
