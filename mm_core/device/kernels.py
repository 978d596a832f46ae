"""Which kernels torch may choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def attention_of_any_length(device: torch.device) -> Iterator[None]:
    """Has torch's attention leave out cuDNN, which it prefers on some accelerators: that plans each length
    anew, some tenths of a second for every one that it has not seen. Other devices have nothing like it."""
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
    """Refuses kernels whose results vary from run to run. To be called before the device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUBLAS varies without it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
