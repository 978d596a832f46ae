"""Process groups of ranks: how they are created, how long ranks wait in them, and the device mesh."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mm_core.device import (
    CPU_BACKEND,
    bind_device,
    communication_backends,
    device_type,
    environment_world,
)
from mm_core.device.torch_private import fake_store, forget_layouts, own_shards_only
from mm_core.errors import MMError

_FOREVER = timedelta(days=3650)

_patience = [timedelta(minutes=30)]  # the timeout of every group created from here on


def set_patience(stuck_after: float | None) -> None:
    """Sets the timeout of collectives longer than the watchdog's, so that the watchdog reports a hang first.

    A collective that times out cannot report which rank hangs, nor where.

    Args:
        stuck_after: the watchdog's limit in seconds; None for no timeout.
    """
    longest = _FOREVER.total_seconds()
    seconds = longest if stuck_after is None else min(2 * stuck_after + 600, longest)
    _patience[0] = timedelta(seconds=seconds)


def start_process_group() -> None:
    """Joins the default process group of the ranks (of one without a launcher) and binds the device."""
    backend = communication_backends()
    bind_device(environment_world().local_rank)
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise MMError(
                f"RANK is set but {' and '.join(missing)} not, so the ranks cannot find each other",
                where="environment",
                hint="start with mm-train --nproc or torchrun, which set them, or unset RANK to train with"
                " one process",
            )
        if not (port := os.environ["MASTER_PORT"]).isdecimal() or not 0 <= int(port) < 65536:
            raise MMError(f"{port!r} is not a port number", where="MASTER_PORT", accepted="1 to 65535")
        try:
            _join_ranks(backend)
        except RuntimeError as fault:
            raise (_rendezvous_error(fault) or fault) from None
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_patience[0])


def _join_ranks(backend: str) -> None:
    """Joins the default process group of ranks that a launcher has started.

    torch's agent has one store for all its starts, so ranks that it starts again would find the addresses of
    dead ones there: each start keeps its own part of the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=_patience[0])
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: Any = dist
    shared = stores.TCPStore(address, port, world, is_master=False, timeout=_patience[0])
    own = stores.PrefixStore(name_start(shared, rank, world), shared)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=_patience[0])


def name_start(store: Any, rank: int, world: int) -> str:
    """Agrees on a new name for this start of all ranks, in a store that has values of earlier starts.

    Rank 0 draws the name, the others answer to it, and rank 0 confirms their answers. A name of an earlier
    start has no confirmation, or one of other answers.

    Args:
        store: shared by all ranks.
        rank: this process.
        world: number of ranks.
    """
    own, pause = uuid.uuid4().hex, 0.01
    if rank == 0:
        store.set("mm_core/start", own)
        answers = store.multi_get([f"{own}/answer/{other}" for other in range(1, world)]) if world > 1 else []
        store.set(f"{own}/confirmed", b" ".join(answers))
        return own
    while True:
        name: str = store.get("mm_core/start").decode()
        store.set(f"{name}/answer/{rank}", own)
        confirmed = f"{name}/confirmed"
        if store.check([confirmed]) and own in store.get(confirmed).decode().split():
            return name
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def end_process_group() -> None:
    """Destroys the default process group, and what torch keeps of its device meshes.

    DTensor caches its results' layouts with the mesh. The mesh of the next process group equals this one, so
    its norms would be reduced in groups that no longer exist, or in others of the same name.
    """
    dist.destroy_process_group()
    forget_layouts()


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """A context in which this process is rank 0 of a default process group whose other ranks exist in name
    only: nothing is sent, and what would be received keeps the values that it has."""

    def gathered(items: list[Any], item: Any, group: object = None) -> None:
        items[:] = [item] * len(items)

    dist.init_process_group("fake", rank=0, world_size=world, store=fake_store())
    try:
        with patch.object(dist, "all_gather_object", gathered), own_shards_only():
            yield
    finally:
        end_process_group()


def ranks_of(arguments: Iterable[Any]) -> list[int]:
    """The ranks of the process group among an operator's arguments; [0] if there is none."""
    objects = (each for each in arguments if isinstance(each, torch.ScriptObject))
    found = [each for each in objects if "ProcessGroup" in str(each._type())]
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(found[0])) if found else [0]


def meet_at_file(file: Path, rank: int, world: int, timeout: float) -> None:
    """Joins the default process group of the ranks of one host, on the CPU, which need no port to meet.

    Args:
        file: where they meet; it does not exist before.
        rank: this process.
        world: number of ranks.
        timeout: seconds that a rank waits for the others.
    """
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        CPU_BACKEND, init_method=f"file://{file}", rank=rank, world_size=world, timeout=limit
    )


def _rendezvous_error(fault: RuntimeError) -> MMError | None:
    """The error for a rendezvous address that does not work; None for another error, such as a lost rank."""
    text, port = str(fault), os.environ["MASTER_PORT"]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return MMError(
            f"port {port} is already in use on this host, so the ranks cannot connect to each other there",
            where="MASTER_PORT",
            accepted="a free port, the same for all ranks",
            hint="end the process that uses it (ss -ltnp shows it; perhaps an earlier run), or choose another"
            " port (torchrun --master-port)",
        )
    if "while trying to connect" in text or "waiting for clients" in text:
        lost = MMError(
            f"not all ranks connected to {os.environ['MASTER_ADDR']}:{port} in time: {text.splitlines()[0]}",
            where="environment",
            hint="check that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same for all ranks, that rank 0"
            " runs on the host MASTER_ADDR, and that its port is reachable from all other hosts",
        )
        lost.passing = True
        return lost
    return None


def cpu_group() -> dist.ProcessGroup | None:
    """A new process group of all ranks for tensors on CPU. Called by all ranks."""
    group: dist.ProcessGroup | None = dist.new_group(backend=CPU_BACKEND, timeout=_patience[0])
    return group


def device_mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A device mesh of all ranks, whose process groups have the same timeout as the default group.

    The groups of torch's `init_device_mesh` have another timeout.

    Args:
        shape: sizes of the mesh's dimensions; their product is the number of ranks.
        names: names of the dimensions.
    """
    mesh = torch.arange(dist.get_world_size()).view(*shape)
    groups: list[dist.ProcessGroup] = []
    for dimension, size in enumerate(shape):
        rows = mesh.swapdims(-1, dimension).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=_patience[0])  # type: ignore[no-untyped-call]
        groups.append(group)
    kind = "cpu" if dist.get_backend() == "fake" else device_type()  # where fakes are, on any host
    return DeviceMesh.from_group(groups, kind, mesh, mesh_dim_names=tuple(names))


def adjacent_group(size: int) -> dist.ProcessGroup:
    """A new process group of this rank and its neighbours: ranks 0 .. size-1, the next `size`, and so on.

    Called by all ranks.

    Args:
        size: ranks of a group; it divides the number of ranks.
    """
    rows = torch.arange(dist.get_world_size()).view(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=_patience[0])  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group


def wait_for_ranks() -> torch.Tensor:
    """Waits until all ranks have reached this call (a barrier on CPU).

    torch's barrier uses the accelerator's group, which connects at its first use through the launcher's
    store; the launcher may have ended by then.

    Returns:
        The reduced tensor. The caller must keep it until the group is destroyed: torch 2.7's gloo releases it
        in a thread, under a lock that the destruction waits for. If that were the last reference, the thread
        would wait for Python's lock: a deadlock.
    """
    met = torch.zeros(1)
    dist.all_reduce(met)
    return met
