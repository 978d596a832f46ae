"""Which kernel of a device an operator runs, and calls of functions on tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mm_core.device.kind import device_type
from mm_core.device.torch_private import FakeTensor, Kernel, kernel_of, without_modes
from mm_core.errors import MMError

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_FUSED = {
    "cuda": "aten::_scaled_dot_product_flash_attention",
    "npu": "aten::_scaled_dot_product_fused_attention_overrideable",
}
"""Device -> its operator in the place of the CPU's attention."""


def kernel_on(operator: str, device: str) -> Kernel:
    """How a device runs an operator.

    Args:
        operator: its name with the overload, such as `aten::add.Tensor`, as the CPU runs it.
        device: `cpu`, or the kind of this host's device.

    Returns:
        native: a kernel of the device's own. decomposed: other operators compute it, on the device.
        fallback: it is computed on the host, and its tensors are copied. missing: it fails. unknown: the
        device's kernels are not loaded here.

    Raises:
        MMError: the name of a device that there is not.
    """
    if device not in ("cpu", *_FUSED):
        accepted = ", ".join(("cpu", *_FUSED))
        raise MMError(f"{device!r} is no kind of device", where="--device", accepted=accepted)
    if device not in ("cpu", device_type()):
        return "unknown"
    if device in _FUSED and operator.startswith(_ATTENTION):
        operator = operator.replace(_ATTENTION, _FUSED[device])
    return kernel_of(operator, device)


def with_numbers(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that reads values of its tensors, such as whether a mask is full.

    In a plan, tensors have no numbers (on the meta device, or fake): then it gets zeros, and ones for bool,
    in their place, and what it returns has none either.
    """
    first = next(each for each in tree_leaves(arguments) if isinstance(each, Tensor))
    if not (first.is_meta or isinstance(first, FakeTensor)):
        return function(*arguments)

    def filled(like: Tensor) -> Tensor:
        return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device="cpu")

    with without_modes():
        found = function(*tree_map_only(Tensor, filled, arguments))
    return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=first.device), found)
