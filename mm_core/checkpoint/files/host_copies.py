"""Copies of the training state in host memory; a checkpoint is written from them while training continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from mm_core.device import synchronize
from mm_core.errors import CheckpointError
from mm_core.modules.shards import like, local

State = Mapping[str, Mapping[str, Tensor]]
"""{"model": {name: tensor}, "optimizer": {name: tensor}, ...}: plain tensors or DTensors."""


class HostCopies:
    """Copies of the training state in host memory for asynchronous saves; each copy reuses the buffers."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._lock = threading.Lock()  # another thread reserves buffers

    def reserve(self, state: State) -> None:
        """Allocates the host buffers of a checkpoint and touches their pages, so that the first copy is fast.

        Existing buffers are kept. CheckpointError if the host has not enough memory.
        """
        with self._lock:
            for part, named in state.items():
                for name, tensor in named.items():
                    key = (part, name)
                    if key in self._buffers or type(share := local(tensor)) is not Tensor:
                        continue
                    try:
                        self._buffer(key, share).zero_()
                    except (RuntimeError, OSError, MemoryError) as fault:
                        raise CheckpointError(
                            f"not enough host memory for a copy of {part}.{name}: {fault}"[:500],
                            hint="set checkpoint.async=false, which needs no copy, or use more ranks:"
                            " each copies less",
                        ) from fault

    def take(self, state: State) -> State:
        """Copies the training state to host memory, unaffected by later steps. DTensors stay DTensors."""
        pairs: list[tuple[Tensor, Tensor]] = []
        copied: dict[str, dict[str, Tensor]] = {part: {} for part in state}
        with self._lock, torch.no_grad():
            for part, named in state.items():
                for name, tensor in named.items():
                    source = local(tensor)
                    if type(source) is Tensor:
                        target = self._buffer((part, name), source)
                        pairs.append((target, source))
                    else:  # a packed tensor (8-bit moments) copies itself
                        target = source.clone().cpu()
                    copied[part][name] = like(tensor, target)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            synchronize()
        return copied

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        held = self._buffers.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu"
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = held
        return held


def check_tensors(tensors: Mapping[str, Mapping[str, object]]) -> None:
    """Raises CheckpointError if a checkpoint's state contains something that is not a tensor."""
    for part, named in tensors.items():
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{part}.{name} cannot be saved as a tensor: it has the type {type(value).__name__}",
                    accepted="tensors",
                    hint="return only tensors from state_dict: a number as a tensor, a text in the config",
                )
