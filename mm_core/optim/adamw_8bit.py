"""AdamW with 8-bit moments, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import nn

from mm_core.device.torch_private import functorch_config
from mm_core.errors import PluginError
from mm_core.optim.parameter_groups import Group

with suppress(ImportError):  # lets torch load torchao's tensors; `adamw_8bit` reports a missing torchao
    import torchao.optim  # noqa: F401


def adamw_8bit(
    groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The AdamW optimizer with moments quantised to 8 bits, in blocks of 256 numbers.

    Shards with fewer than 4096 numbers, or not a multiple of 256, keep moments in full precision. torchao
    compiles the update on the first step.

    Reference: https://arxiv.org/abs/2110.02861

    Args:
        groups: parameter groups (`groups_of`); a group's own settings replace those below.
        lr: base learning rate, which the schedule's factors multiply.
        betas: decay of the first and the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: a step removes `lr` times this share of each parameter.

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
    """Converts learning rates to tensors: torchao compiles for tensors, but a schedule sets numbers."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


@cache
def _optimizer_class() -> Callable[..., torch.optim.Optimizer]:
    """torchao's class; adds the copies needed for saving in the background to its quantised tensors."""
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
            # torch 2.13 caches code compiled for a DTensor by its full shape, and reuses it on a rank whose
            # shard has a different size: it would write to memory outside the tensor.
            with functorch_config.patch(enable_autograd_cache=False):
                return super().step(closure)

    return OwnKernels


@cache
def _check_runs(kind: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """PluginError if a step on a small tensor fails: torchao needs a compiler for the device."""
    probe = nn.Parameter(torch.zeros(64, 64, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        kind([probe], lr=torch.tensor(1e-3)).step()
    except Exception as fault:
        # The compiler's errors have no common class; for the user they all mean the same.
        reason = str(fault).strip().partition("\n")[0]
        raise PluginError(
            f"torchao's 8-bit AdamW does not run on {device.type}: {reason}",
            where="optimizer",
            accepted="a device that torch.compile supports (on CPU it needs a C++ compiler)",
            hint="set optimizer.type to adamw",
        ) from None
