"""This rank's share of a sharded tensor, taken out and put back where it lies."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's share."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def like(tensor: Tensor, share: Tensor) -> Tensor:
    """`share`, laid out over the ranks as `tensor` is, on the device that `share` is on.

    `DTensor.from_local` would move it to the mesh's device at once: what is copied into `share` afterwards
    would be lost, and tensors that are kept on the host would meet one on an accelerator.
    """
    if not isinstance(tensor, DTensor):
        return share
    return DTensor(share, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
