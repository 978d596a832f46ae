"""The kernels that torch may choose: settings, and attention to a part of the keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mm_core.device.kind import device_type

_ATEN: Any = torch.ops.aten

ATTENTION_OPERATORS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "npu.npu_fusion_attention",
    "npu.npu_fusion_attention_v3",
    "flash_attn._flash_attn_forward",
    "flash_attn._flash_attn_varlen_forward",
    "flash_attn_3._flash_attn_forward",
    "_diffusers_flash_attn_3._flash_attn_forward",
)
"""Operators of torch.ops that attend in a forward: torch's own, and those that libraries register."""


def missing_compiler() -> str | None:
    """The compiler that torch.compile needs for this process's device and does not find; None if it does."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    device = device_type()
    try:
        if device == "cpu":
            get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # CXX may name anything
        return "C++ compiler (g++, or what CXX names)"
    return "Triton" if device == "cuda" and not has_triton() else None


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


_VARIABLES = {
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "npu": {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"},
}
"""Variables of a device's libraries whose results otherwise vary, with values that they read."""


def set_deterministic() -> str:
    """Makes torch and the device's libraries refuse what varies. Call it before the device is used.

    Variables that the environment sets already keep their values.

    Returns:
        A sentence with every switch and its value.
    """
    device = device_type()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    switches = {"torch.use_deterministic_algorithms": "True", "torch.backends.cudnn.benchmark": "False"}
    for name, value in _VARIABLES.get(device, {}).items():
        switches[name] = os.environ.setdefault(name, value)
    if device == "npu":
        # Private formats of weights choose other kernels.
        torch.get_device_module(device).config.allow_internal_format = False
        switches["torch.npu.config.allow_internal_format"] = "False"
    return "run.deterministic: " + ", ".join(f"{name}={value}" for name, value in switches.items())


def set_numerics(deterministic: bool, float32_matmul: str | None) -> list[str]:
    """Applies `run.deterministic` and `run.float32_matmul`; returns a sentence about each that is set."""
    notes = [set_deterministic()] if deterministic else []
    if float32_matmul is not None:
        torch.set_float32_matmul_precision(float32_matmul)
        notes.append(f"run.float32_matmul: torch.set_float32_matmul_precision({float32_matmul!r})")
    return notes


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
