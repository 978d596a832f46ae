"""Process groups: where ranks meet, how long they wait for each other, and the mesh that they form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mm_core.device import (
    CPU_BACKEND,
    World,
    bind_device,
    communication_backends,
    device_type,
    environment_world,
)
from mm_core.errors import MMError

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
    world, backend = environment_world(), communication_backends()
    bind_device(world.local_rank)
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise MMError(
                f"RANK is set, {' and '.join(missing)} not: the ranks cannot find each other",
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
    group: dist.ProcessGroup | None = dist.new_group(backend=CPU_BACKEND, timeout=_patience[0])
    return group


def device_mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """All ranks in a mesh of that shape. Unlike torch's `init_device_mesh`, its groups wait as long as the
    default one."""
    mesh = torch.arange(dist.get_world_size()).view(*shape)
    groups: list[dist.ProcessGroup] = []
    for dimension, size in enumerate(shape):
        rows = mesh.swapdims(-1, dimension).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=_patience[0])  # type: ignore[no-untyped-call]
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type(), mesh, mesh_dim_names=tuple(names))


def wait_for_ranks() -> torch.Tensor:
    """Waits until all ranks have come here. Unlike torch's barrier it does so on CPU: an accelerator's group
    connects at its first use, through a launcher that may be gone by then.

    Returns:
        What was reduced, to be held by who destroys the group next. torch 2.7's gloo lets go of it in a
        thread, within a lock that the destruction waits for; were that the last reference, the thread would
        wait for Python's lock, and neither would ever go on.
    """
    met = torch.zeros(1)
    dist.all_reduce(met)
    return met
