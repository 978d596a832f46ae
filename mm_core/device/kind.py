"""Which device this process computes on, by its environment and by what is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import cast

import torch

from mm_core.errors import MMError

CPU_BACKEND = "gloo"
"""Carries tensors on CPU between ranks."""

_BACKENDS = {"cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class World:
    """Who this process is. rank of world_size processes; local_rank on its host."""

    rank: int
    local_rank: int
    world_size: int


def environment_world() -> World:
    """What the launcher's environment says; a lone process without one is rank 0 of 1."""
    read = os.environ.get
    try:
        rank, local = int(read("RANK", "0")), int(read("LOCAL_RANK", read("RANK", "0")))
        return World(rank, local, int(read("WORLD_SIZE", "1")))
    except ValueError as fault:
        raise MMError(
            f"RANK, LOCAL_RANK and WORLD_SIZE must be integers ({fault})",
            where="environment",
            hint="let mm-train --nproc or torchrun set them",
        ) from None


if os.environ.get("MM_DEVICE") == "cpu":
    # Model libraries import it where it is installed, and fail with it where its own libraries are missing.
    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]


@cache
def device_type() -> str:
    """`npu`, `cuda` or `cpu`: the accelerator at hand; MM_DEVICE overrides it."""
    wanted = os.environ.get("MM_DEVICE")
    if wanted == "cpu":
        return "cpu"
    found = "npu" if _has_npu() else "cuda" if torch.cuda.is_available() else "cpu"
    if wanted and wanted != found:
        raise MMError(
            f"MM_DEVICE={wanted} is not available here",
            where="environment",
            accepted="cpu" if found == "cpu" else f"{found}, cpu",
            hint="install the accelerator's build of torch, or unset MM_DEVICE",
        )
    return found


def _has_npu() -> bool:
    """Whether torch_npu is installed and sees a device. MMError when it is installed and broken.

    The commands keep torch from importing it (TORCH_DEVICE_BACKEND_AUTOLOAD): with MM_DEVICE=cpu nobody does.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except Exception as fault:
        raise MMError(
            f"torch_npu is installed but cannot be imported: {' '.join(str(fault).split())}"[:400],
            where="environment",
            hint="load the CANN environment of this host, or set MM_DEVICE=cpu",
        ) from fault
    return bool(module_of("npu").is_available())


def module_of(kind: str) -> ModuleType:
    """torch's module of an accelerator: `torch.cuda`, `torch.npu`."""
    return cast(ModuleType, getattr(torch, kind))


def current_module() -> ModuleType:
    """torch's module of the accelerator at hand."""
    return module_of(device_type())


def bind_device(local_rank: int) -> None:
    """Gives this process its accelerator. MMError where the host has fewer."""
    kind = device_type()
    if kind == "cpu":
        return
    if local_rank >= device_count():
        raise MMError(
            f"local rank {local_rank} has no {kind} device: this host has {device_count()}",
            hint=f"launch at most {device_count()} ranks a host (--nproc auto)",
        )
    module_of(kind).set_device(local_rank)


def communication_backends() -> str:
    """What torch's process groups are made with: that of CPU tensors, and that of the accelerator."""
    kind = device_type()
    return CPU_BACKEND if kind == "cpu" else f"cpu:{CPU_BACKEND},{kind}:{_BACKENDS[kind]}"


def device_count() -> int:
    """Accelerators on this host; 0 on CPU."""
    return 0 if device_type() == "cpu" else int(current_module().device_count())


def current_device() -> torch.device:
    """This rank's device."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, environment_world().local_rank)


def synchronize() -> None:
    """Waits for the device's queue."""
    if device_type() != "cpu":
        current_module().synchronize()


def device_stack() -> dict[str, str]:
    """Names and versions of the stack below torch, for the run's manifest."""
    kind = device_type()
    stack = {"device": kind, "torch": str(torch.__version__)}
    if kind != "cpu":
        stack["name"] = current_module().get_device_name()
    if kind == "cuda":
        stack["cuda"] = str(torch.version.cuda)
    elif kind == "npu":
        stack["torch_npu"] = sys.modules["torch_npu"].__version__
    return stack
