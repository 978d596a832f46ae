"""This rank's shard of a sharded tensor: taking it out, turning it back into a DTensor, and gathering all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mm_core.device.torch_private import DTensorSpec, TensorMeta
from mm_core.modules.flat_shards import FlatShard


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a module's tensor; a plain tensor as it is."""
    if isinstance(tensor, FlatShard):
        return tensor.share
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def like(tensor: Tensor, share: Tensor) -> Tensor:
    """Turns a shard into a DTensor with the same sharding as `tensor`, on the shard's own device.

    `DTensor.from_local` would move it to the mesh's device at once: later copies into `share` would be lost,
    and tensors in host memory would be mixed with one on an accelerator.
    """
    if isinstance(tensor, FlatShard):
        return tensor.like(share)
    if not isinstance(tensor, DTensor):
        return share
    return DTensor(share, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def like_rows(tensor: Tensor, share: Tensor, rows: int) -> Tensor:
    """Turns this rank's rows [local rows, columns] of a matrix into a DTensor [rows, columns] that is sharded
    like `tensor`, on the rows' own device; a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return share
    meta = TensorMeta(torch.Size((rows, share.shape[1])), (share.shape[1], 1), share.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, meta)
    return DTensor(share, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def gathered(tensor: Tensor) -> Tensor:
    """A copy of the unsharded tensor, detached. A collective if it is sharded."""
    if isinstance(tensor, FlatShard):
        return tensor.gathered()
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
