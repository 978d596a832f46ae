"""AdamW with moments of 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache

import torch
import torch._functorch.config
from torch import nn

from mm_core.errors import PluginError
from mm_core.optim.parameter_groups import Group

with suppress(ImportError):  # torch then reads the tensors that it packs: `adamw_8bit` says what is missing
    import torchao.optim  # noqa: F401


def adamw_8bit(
    groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW whose moments are quantised in blocks of 256 numbers; shards of less than 4096 numbers, or of no
    multiple of 256, keep moments of full precision. torchao compiles the update on the first step.

    Reference: https://arxiv.org/abs/2110.02861

    Raises:
        PluginError: torchao is missing, or does not run on the device.
    """
    kind = _optimizer_class()
    for device in {parameter.device for group in groups for parameter in group["params"]}:
        _check_runs(kind, device)
    first, second = betas  # a YAML gives a list
    optimizer = kind(
        [dict(group) for group in groups], lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay
    )
    optimizer.register_step_pre_hook(_rates_as_tensors)
    return optimizer


def _rates_as_tensors(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """torchao compiles for a rate that is a tensor; a schedule sets numbers."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


@cache
def _optimizer_class() -> Callable[..., torch.optim.Optimizer]:
    """torchao's class, whose quantised tensors are taught the copies that saving in the background makes."""
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as fault:
        raise PluginError(
            f"adamw_8bit needs torchao, which cannot be imported: {fault}",
            where="optimizer",
            hint="pip install 'mm-core[low-bit]', or set optimizer.type to adamw",
        ) from None

    def copied(
        func: object, types: object, args: Sequence[OptimState8bit], kwargs: Mapping[str, object]
    ) -> OptimState8bit:
        held = args[0]
        where = kwargs.get("device") or held.device
        parts = (part.to(where, copy=True) for part in (held.codes, held.scale, held.qmap))
        return OptimState8bit(*parts, held.signed, dtype=kwargs.get("dtype") or held.dtype)

    aten = torch.ops.aten
    # torchao's own `to` shares memory where the device stays the same, even when asked for a copy.
    OptimState8bit.implements([aten.clone.default, aten.empty_like.default, aten._to_copy.default])(copied)

    class OwnKernels(AdamW8bit):  # type: ignore[misc]
        def step(self, closure: Callable[[], float] | None = None) -> object:
            # torch 2.13 names what it has compiled for a DTensor by its whole shape, and takes it again on
            # a rank whose shard has another size: memory that is not the tensor's would be written.
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return super().step(closure)

    return OwnKernels


@cache
def _check_runs(kind: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """PluginError when a step on a small tensor fails: torchao needs a compiler for the device."""
    probe = nn.Parameter(torch.zeros(64, 64, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        kind([probe], lr=torch.tensor(1e-3)).step()
    except Exception as fault:
        # The compiler's own errors have no common class; all mean the same to the user.
        reason = str(fault).strip().partition("\n")[0]
        raise PluginError(
            f"torchao's 8-bit AdamW does not run on {device.type}: {reason}",
            where="optimizer",
            accepted="a device that torch.compile serves (on CPU it needs a C++ compiler)",
            hint="set optimizer.type to adamw",
        ) from None
