"""Settings for the kernels that torch may choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
