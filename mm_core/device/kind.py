"""The device of this process, from its environment and the installed packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from packaging.version import Version

from mm_core.errors import MMError, plural

CPU_BACKEND = "gloo"
"""The communication backend for CPU tensors."""

_BACKENDS = {"cuda": "nccl", "npu": "hccl"}

ACCELERATOR_NAMES = frozenset({*_BACKENDS, *_BACKENDS.values()})
"""Names of devices and backends that no component needs to know."""

NEWEST_TORCH = (2, 15)
"""Minor version of the newest torch with which mm_core is tested."""


def untested_torch(installed: str = torch.__version__) -> tuple[str, ...]:
    """A note if the installed torch is of a newer minor version than those that mm_core is tested with."""
    release = Version(installed).release[:2]
    if release <= NEWEST_TORCH:
        return ()
    newest = ".".join(map(str, NEWEST_TORCH))
    return (f"torch {installed} is newer than {newest}, the newest that this mm_core is tested with",)


@dataclass(frozen=True)
class World:
    """The rank of this process.

    Attributes:
        rank: rank among all processes.
        local_rank: rank among the processes on its host; also the index of its device.
        world_size: number of processes.
    """

    rank: int
    local_rank: int
    world_size: int


def environment_world() -> World:
    """The rank and world size in the launcher's environment; a process without a launcher is rank 0 of 1.

    Raises:
        MMError: a variable that is not an integer.
    """
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
    # Model libraries import torch_npu if it is installed, and fail if its own libraries are missing.
    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]


@cache
def device_type() -> str:
    """The kind of device on this host: `npu`, `cuda` or `cpu`; MM_DEVICE overrides it.

    Raises:
        MMError: MM_DEVICE names a device that is not available, or torch_npu cannot be imported.
    """
    wanted = os.environ.get("MM_DEVICE")
    if wanted == "cpu":
        return "cpu"
    found = "npu" if _has_npu() else "cuda" if torch.cuda.is_available() else "cpu"
    if wanted and wanted != found:
        raise MMError(
            f"MM_DEVICE={wanted} is not available here",
            where="environment",
            accepted="cpu" if found == "cpu" else f"{found}, cpu",
            hint="install the build of torch for this accelerator, or unset MM_DEVICE",
        )
    return found


def _has_npu() -> bool:
    """Whether torch_npu is installed and finds a device. MMError if it is installed but cannot be imported.

    The commands prevent torch from importing it (TORCH_DEVICE_BACKEND_AUTOLOAD), so with MM_DEVICE=cpu it is
    never imported.
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
    return bool(torch.get_device_module("npu").is_available())


def current_module() -> ModuleType:
    """torch's module for this host's accelerator."""
    found: ModuleType = torch.get_device_module(device_type())
    return found


def bind_device(local_rank: int) -> None:
    """Selects the accelerator of this process by its local rank.

    Raises:
        MMError: the host has fewer accelerators.
    """
    kind = device_type()
    if kind == "cpu":
        return
    if local_rank >= device_count():
        raise MMError(
            f"there is no {kind} device for local rank {local_rank}: this host has {device_count()}",
            hint=f"start at most {plural(device_count(), 'rank')} per host: --nproc auto",
        )
    torch.get_device_module(kind).set_device(local_rank)


def communication_backends() -> str:
    """The communication backends of process groups: for CPU tensors, and for the accelerator's."""
    kind = device_type()
    return CPU_BACKEND if kind == "cpu" else f"cpu:{CPU_BACKEND},{kind}:{_BACKENDS[kind]}"


def device_count() -> int:
    """The number of accelerators on this host; 0 on CPU."""
    return 0 if device_type() == "cpu" else int(current_module().device_count())


def current_device() -> torch.device:
    """The device that this rank computes on."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, environment_world().local_rank)


def synchronize() -> None:
    """Waits until the device has finished its queue."""
    if device_type() != "cpu":
        current_module().synchronize()


def device_stack() -> dict[str, str]:
    """Names and versions of the device, torch and its accelerator libraries, for the run's manifest."""
    kind = device_type()
    stack = {"device": kind, "torch": str(torch.__version__)}
    if kind != "cpu":
        stack["name"] = current_module().get_device_name()
    if kind == "cuda":
        stack["cuda"] = str(torch.version.cuda)
    elif kind == "npu":
        stack["torch_npu"] = sys.modules["torch_npu"].__version__
    return stack
