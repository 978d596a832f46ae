"""Activation recomputation, applied to modules from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module, use_reentrant: bool) -> None:
    """Makes `module` keep its inputs only and run its forward again in backward.

    The bound `forward` is replaced, so parameter paths stay what they were, and hooks (those of
    fully_shard too) stay outside of the recomputation.
    """
    forward = module.forward

    @functools.wraps(forward)  # input casting reads the names of positions from the signature
    def recomputed(*args: object, **kwargs: object) -> object:
        names, values = tuple(kwargs), tuple(kwargs.values())

        def run(_: torch.Tensor, *flat: object) -> object:
            # Keywords travel as positions: the reentrant form tracks gradients of positions only.
            split = len(flat) - len(names)
            return forward(*flat[:split], **dict(zip(names, flat[split:], strict=True)))

        # Without an input that requires a gradient, the reentrant form would drop the parameters'.
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        return checkpoint(run, anchor, *args, *values, use_reentrant=use_reentrant)

    replacement: Callable[..., object] = recomputed
    module.forward = replacement
