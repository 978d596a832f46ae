"""Gathering what the ranks have computed, for losses that compare each sample with those of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather


def gather_samples(tensor: Tensor) -> Tensor:
    """Gathers a tensor of each rank's samples from all ranks, with gradients back to every rank.

    If each rank's loss is the sum over its own samples, the gradients that the engine adds over the ranks are
    those of the loss on one rank with all the samples. Called by all ranks, equally often.

    Args:
        tensor: [B,...], of the same shape on every rank.

    Returns:
        [ranks * B,...] in rank order; the tensor itself for a single process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    return torch.cat(list(all_gather(tensor.contiguous())))  # type: ignore[no-untyped-call]
