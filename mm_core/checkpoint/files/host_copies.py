"""Copies of a training state in host memory, which a checkpoint is written from while training goes on."""

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
    """Copies of a state in host memory, whose buffers are used again by the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._lock = threading.Lock()  # buffers are reserved by another thread

    def reserve(self, state: State) -> None:
        """Makes the buffers and touches their pages, so that the first copy costs no more than the next.

        A copy may have been taken already: buffers that are there are left as they are. CheckpointError where
        the host has no memory for them.
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
                            f"the host has no memory for a copy of {part}.{name}: {fault}"[:500],
                            hint="checkpoint.async=false needs none; more ranks need less each",
                        ) from fault

    def take(self, state: State) -> State:
        """The state as it is now: what changes later does not reach it. DTensors stay DTensors."""
        pairs: list[tuple[Tensor, Tensor]] = []
        copied: dict[str, dict[str, Tensor]] = {part: {} for part in state}
        with self._lock, torch.no_grad():
            for part, named in state.items():
                for name, tensor in named.items():
                    source = local(tensor)
                    if type(source) is Tensor:
                        target = self._buffer((part, name), source)
                        pairs.append((target, source))
                    else:  # a packed kind of tensor (8-bit moments): it copies itself
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
    """CheckpointError for state that is no tensor: such state belongs into the facts."""
    for part, named in tensors.items():
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{part}.{name} is a {type(value).__name__}",
                    accepted="tensors",
                    hint="put other state in facts",
                )
