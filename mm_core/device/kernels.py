"""The kernels that torch may choose: settings, and attention to a part of the keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_ATEN: Any = torch.ops.aten


@contextmanager
def attention_of_any_length(device: torch.device) -> Iterator[None]:
    """A context in which attention on the device does not use cuDNN, for inputs of many lengths.

    torch prefers cuDNN on some accelerators, which takes some tenths of a second to plan each new length.
    Other devices need nothing.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if device.type != "cuda" or not before:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def set_deterministic() -> None:
    """Makes torch refuse device kernels with non-deterministic results. Call it before the device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUBLAS varies without it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def returns_log_sums(device_type: str) -> bool:
    """Whether `attend_part` has a kernel for a device."""
    return device_type in ("cpu", "cuda")


def attend_part(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Any]:
    """Attention to a part of the keys, with what joins it to the attention to other parts.

    Args:
        q: [B,H,N,D].
        k: [B,H,L,D].
        v: as k.
        scale: factor of the scores; None for D**-0.5.

    Returns:
        The output [B,H,N,D]; the logarithm of the sum of the exponentials of the scores, float32 [B,H,N]; and
        what `attend_part_backward` needs.
    """
    if q.device.type == "cpu":
        out, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return out, sums, None
    if q.dtype != torch.float32 and q.shape[-1] % 8 == 0:
        out, sums, *kept = _ATEN._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return out, sums, kept[:6]
    out, sums, *kept = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, sums[..., : q.shape[2]], kept


def attend_part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    kept: Any,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention over all keys for `q`, and for a part of the keys and their values.

    Args:
        grad: gradient of the output over all keys [B,H,N,D].
        q: as for `attend_part`; so are k, v and scale.
        k: this part.
        v: this part.
        out: the output over all keys.
        sums: the logarithm of the sum over all keys [B,H,N].
        kept: the third result of `attend_part`.
        scale: as there.
    """
    if q.device.type == "cpu":
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(grad, q, k, v, out, sums, 0.0, False, scale=scale)
    elif len(kept) > 2:
        *lengths, seed, offset = kept
        backward = _ATEN._scaled_dot_product_flash_attention_backward
        found = backward(grad, q, k, v, out, sums, *lengths, 0.0, False, seed, offset, scale=scale)
    else:
        # The kernel reads the sums in blocks of 32 rows; rows beyond the last get no attention.
        sums = pad(sums, (0, -sums.shape[-1] % 32), value=float("inf"))
        backward = _ATEN._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        found = backward(grad, q, k, v, None, out, sums, *kept, 0.0, wanted, scale=scale)
    return found[0], found[1], found[2]
