"""The device stack: the only file that names accelerators and their communication backends.

`cuda` speaks nccl, Ascend `npu` (through torch_npu, found by import) speaks hccl, `cpu` speaks gloo.
Every process group also carries gloo for CPU tensors: the loop's small collectives and checkpoints
use it.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mm_core.errors import MMError

_BACKENDS = {"cuda": "nccl", "npu": "hccl"}

if os.environ.get("MM_DEVICE") == "cpu":
    # Model libraries import it where it is installed, and fail with it where its own libraries are missing.
    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]


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
            f"torch_npu is installed but can not be imported: {' '.join(str(fault).split())}"[:400],
            where="environment",
            hint="load the CANN environment of this host, or set MM_DEVICE=cpu",
        ) from fault
    return bool(_module("npu").is_available())


def _module(kind: str) -> ModuleType:
    return cast(ModuleType, getattr(torch, kind))


def device_count() -> int:
    """Accelerators on this host; 0 on CPU."""
    return 0 if device_type() == "cpu" else int(_module(device_type()).device_count())


def current_device() -> torch.device:
    """This rank's device."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, environment_world().local_rank)


_FOREVER = timedelta(days=3650)
_patience = [timedelta(minutes=30)]  # of every group that is made from here on


def set_patience(stuck_after: float | None) -> None:
    """Has ranks wait for each other longer than the watchdog for a run that stands still: a collective that
    gives up first knows neither the rank that is to blame nor where it stands. None: for ever."""
    longest = _FOREVER.total_seconds()
    seconds = longest if stuck_after is None else min(2 * stuck_after + 600, longest)
    _patience[0] = timedelta(seconds=seconds)


def start_process_group() -> World:
    """Joins the default process group (a group of one for a lone process) and binds the device."""
    world, kind = environment_world(), device_type()
    if kind != "cpu":
        if world.local_rank >= device_count():
            raise MMError(
                f"local rank {world.local_rank} has no {kind} device: this host has {device_count()}",
                hint=f"launch at most {device_count()} ranks a host (--nproc auto)",
            )
        _module(kind).set_device(world.local_rank)
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{_BACKENDS[kind]}"
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise MMError(
                f"RANK is set, {' and '.join(missing)} not: the ranks can not find each other",
                where="environment",
                hint="let mm-train --nproc or torchrun set them, or unset RANK to train with one process",
            )
        if not (port := os.environ["MASTER_PORT"]).isdecimal() or not 0 <= int(port) < 65536:
            raise MMError(f"{port!r} is no port", where="MASTER_PORT", accepted="1 to 65535")
        try:
            dist.init_process_group(backend, timeout=_patience[0])
        except RuntimeError as fault:
            raise (_not_met(fault) or fault) from None
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_patience[0])
    return world


def _not_met(fault: RuntimeError) -> MMError | None:
    """The sentence for an address at which ranks cannot meet; None for another fault, such as a rank that is
    lost."""
    text, port = str(fault), os.environ["MASTER_PORT"]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return MMError(
            f"port {port} is in use on this host, and the ranks cannot meet there",
            where="MASTER_PORT",
            accepted="a free port, the same for all ranks",
            hint="end what listens there (ss -ltnp), an earlier run perhaps, or choose another one"
            " (torchrun --master-port)",
        )
    if "while trying to connect" in text or "waiting for clients" in text:
        return MMError(
            f"the ranks did not all meet at {os.environ['MASTER_ADDR']}:{port} in time:"
            f" {text.splitlines()[0]}",
            where="environment",
            hint="are MASTER_ADDR, MASTER_PORT and WORLD_SIZE the same for all ranks, does rank 0 run on the"
            " host of MASTER_ADDR, and is its port reachable from every other one?",
        )
    return None


def cpu_group() -> dist.ProcessGroup | None:
    """A new group of all ranks for tensors on CPU. Called by all of them."""
    return cast("dist.ProcessGroup | None", dist.new_group(backend="gloo", timeout=_patience[0]))


def device_mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """All ranks in a mesh of that shape. Unlike torch's `init_device_mesh`, its groups wait as long as the
    default one."""
    mesh = torch.arange(dist.get_world_size()).view(*shape)
    groups = []
    for dimension, size in enumerate(shape):
        rows = mesh.swapdims(-1, dimension).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=_patience[0])  # type: ignore[no-untyped-call]
        groups.append(cast("dist.ProcessGroup", group))
    return DeviceMesh.from_group(groups, device_type(), mesh, mesh_dim_names=tuple(names))


def wait_for_ranks() -> None:
    """Waits until all ranks have come here. Unlike torch's barrier it does so on CPU: an accelerator's group
    connects at its first use, through a launcher that may be gone by then."""
    dist.all_reduce(torch.zeros(1))


def synchronize() -> None:
    """Waits for the device's queue."""
    if device_type() != "cpu":
        _module(device_type()).synchronize()


class DeviceClock:
    """Moments in the device's queue, or on the wall where there is none: marking one waits for nothing."""

    def mark(self) -> Any:
        """A moment."""
        if device_type() == "cpu":
            return time.perf_counter()
        event = _module(device_type()).Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """Between two moments; waits until the device has reached the second."""
        if device_type() == "cpu":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000


def peak_memory_bytes() -> int:
    """Most memory held at once since the last reset: the device's allocator, or the process on CPU."""
    if device_type() != "cpu":
        return int(_module(device_type()).max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> None:
    """`peak_memory_bytes` counts from here on; a process on CPU can not forget."""
    if device_type() != "cpu":
        _module(device_type()).reset_peak_memory_stats()


class MemoryRecorder:
    """Records what the accelerator's allocator does, for PyTorch's memory viewer."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def start(self) -> None:
        """Begins to record."""
        self._memory._record_memory_history(max_entries=100_000)

    def write(self, path: Path) -> None:
        """Writes what was recorded: a pickle that the viewer reads."""
        self._memory._dump_snapshot(str(path))

    def stop(self) -> None:
        """Ends the recording."""
        self._memory._record_memory_history(enabled=None)


def memory_recorder() -> MemoryRecorder | None:
    """The recorder of this device's allocator; None on CPU, or where its build of torch has none."""
    if device_type() == "cpu":
        return None
    memory = getattr(_module(device_type()), "memory", None)
    return MemoryRecorder(memory) if hasattr(memory, "_record_memory_history") else None


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


_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),  # nvidia.com/en-us/data-center/gb300-nvl72: 360 PF sparse over 72, halved
    ("GB200", 2500e12),  # nvidia.com/en-us/data-center/gb200-nvl72: 360 PF sparse over 72, halved
    ("B300", 2250e12),  # nvidia.com/en-us/data-center/hgx: 36 PF sparse over 8, halved
    ("B200", 2250e12),  # nvidia.com/en-us/data-center/hgx: 36 PF sparse over 8, halved
    ("H200 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h200: 1,671 sparse, halved
    ("H200", 989.4e12),  # nvidia.com/en-us/data-center/h200: 1,979 sparse, halved
    ("H100 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h100: 1,671 sparse, halved
    ("H100 PCIe", 756.4e12),  # NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table 2: PCIe
    ("H100", 989.4e12),  # the same table: SXM5
    ("H800 PCIe", 756.4e12),  # as the H100's: the H800 differs in its links and fp64
    ("H800", 989.4e12),
    ("H20", 148e12),  # NVIDIA H20 datasheet
    ("A100", 312e12),  # nvidia.com/en-us/data-center/a100
    ("A800", 312e12),  # as the A100's: the A800 differs in its links
    ("L40S", 362.05e12),  # nvidia.com/en-us/data-center/l40s: 362.05, and 733 sparse
    ("RTX 4090", 165.2e12),  # NVIDIA Ada GPU Architecture (whitepaper), appendix A: fp32 accumulation
    ("RTX 3090", 71e12),  # NVIDIA Ampere GA102 GPU Architecture (whitepaper), appendix A: fp32 accumulation
    ("V100-PCIE", 112e12),  # NVIDIA V100 datasheet; of fp16: it has no bf16
    ("V100", 125e12),  # the same datasheet: SXM2
    ("Ascend910B4", 280e12),  # Huawei Atlas 300T A2, product page; of fp16, as below
    ("Ascend910B3", 313e12),  # Huawei Atlas 800T A2, product page
    ("Ascend910B", 354e12),  # github.com/volcengine/verl, flops_counter.py: 24 cores x 8192 x 1.8 GHz
)
"""Dense bf16 operations a second, by what stands in the device's name; the first that fits counts."""


def published_peak(name: str) -> float | None:
    """Dense bf16 operations a second of the accelerator of that name; None where no figure is known."""
    return next((peak for part, peak in _PEAKS if part in name), None)


def peak_flops() -> float | None:
    """Dense bf16 operations a second of this device, where they are published; None on CPU."""
    kind = device_type()
    return None if kind == "cpu" else published_peak(str(_module(kind).get_device_name()))


def device_stack() -> dict[str, str]:
    """Names and versions of the stack below torch, for the run's manifest."""
    kind = device_type()
    stack = {"device": kind, "torch": str(torch.__version__)}
    if kind == "cuda":
        stack |= {"name": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    elif kind == "npu":
        stack |= {"name": _module("npu").get_device_name(), "torch_npu": sys.modules["torch_npu"].__version__}
    return stack
