"""Input casting under mixed precision that leaves timesteps alone.

fully_shard's own `cast_forward_inputs` turns timestep 998.7 into 1000 in bf16.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

KEEP = frozenset({"timestep", "timesteps", "t", "sigma", "sigmas"})
"""Names of inputs whose precision is never lowered."""


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating tensors given to `module.forward` to `dtype`, all but those named in KEEP.

    Tensors within containers (rotary tables) and double-precision ones keep their dtype.
    """
    names = list(inspect.signature(module.forward).parameters)

    def convert(name: str | None, value: Any) -> Any:
        lower = isinstance(value, torch.Tensor) and value.dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
        )
        return value.to(dtype) if lower and name not in KEEP else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        positions = [*names[: len(args)], *[None] * (len(args) - len(names))]
        cast_args = tuple(convert(name, value) for name, value in zip(positions, args, strict=False))
        return cast_args, {name: convert(name, value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)
