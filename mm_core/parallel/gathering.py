"""Gathering what the ranks have computed, for losses that compare each sample with those of all ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm_core.errors import ContractError


class _Gathered(torch.autograd.Function):
    """All ranks' tensors in rank order; the backward adds what all ranks have computed from this rank's.

    Own code, since torch's `distributed.nn.functional.all_gather` is deprecated, and what replaces it is
    private and not in every supported version.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        added = gradients[0].clone(memory_format=torch.contiguous_format)  # autograd may still read it
        dist.all_reduce(added)
        return added.chunk(dist.get_world_size())[dist.get_rank()]


def gather_samples(tensor: Tensor) -> Tensor:
    """Gathers a tensor of each rank's samples from all ranks, with gradients back to every rank.

    If each rank's loss is the sum over its own samples, the gradients that the engine adds over the ranks are
    those of the loss on one rank with all the samples. Called by all ranks, equally often. Samples that
    several ranks compute (`Engine.data_ranks`) are in it several times.

    Args:
        tensor: [B,...], of the same shape on every rank.

    Returns:
        [ranks * B,...] in rank order; the tensor itself for a single process.

    Raises:
        ContractError: the tensor has no dimension of samples.
    """
    if not tensor.dim():
        raise ContractError(
            "gather_samples was called with a tensor of the shape []",
            where=f"{(caller := sys._getframe(1)).f_code.co_filename}, line {caller.f_lineno}",
            accepted="[B,...], what this rank has computed of each of its samples",
            hint="gather before you sum over the samples",
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    gathered: Tensor = _Gathered.apply(tensor.contiguous())  # type: ignore[no-untyped-call]
    return gathered
