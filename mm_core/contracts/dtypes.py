"""Dtype names of the config and the torch dtypes they stand for."""

from __future__ import annotations

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name in a config: `bf16` -> `torch.bfloat16`. See `DType`."""
    return _DTYPES[name]
