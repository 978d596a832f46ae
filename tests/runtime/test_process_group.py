"""A process group ends, also where one follows the other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mm_core.runtime.groups import name_start
from support import warm

MANY = (
    "from mm_core.runtime.process_group import process_group\n"
    "for _ in range(200):\n"
    "    with process_group(None): pass\n"
)


MESHES = """
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from mm_core.runtime.groups import cpu_group, device_mesh
from mm_core.runtime.process_group import process_group

for others in (0, 2):
    with process_group(None):
        kept = [cpu_group() for _ in range(others)]
        mesh = device_mesh((1, 1), ("replicate", "shard"))["shard"]
        gradient = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        norm = nn.utils.get_total_norm([gradient])
        assert norm.device_mesh.get_group() is mesh.get_group()
        assert float(norm.full_tensor()) == 2
"""


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_start_again_agree_on_a_part_of_the_store_that_no_start_had(late, free_port):
    """One store for all starts, as that of torch's agent; one rank comes later than the others."""
    server = dist.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    names: list[set[str]] = []

    def join(rank: int) -> None:
        time.sleep(0.2 * (rank == late))
        store = dist.TCPStore("127.0.0.1", free_port, is_master=False, timeout=timedelta(seconds=20))
        names[-1].add(name_start(store, rank, 3))

    for _ in range(3):
        names.append(set())
        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(names[-1]) == 1
        server.set("mm_core/start", "killed")  # of a start whose rank 0 ended before it confirmed anything
    assert len(set.union(*names)) == 3


@pytest.mark.slow
def test_the_next_group_computes_in_its_own_groups():
    """torch caches the mesh of results, which equals that of the next process group."""
    assert warm.run(["-c", MESHES], timeout=60).returncode == 0


@pytest.mark.slow
def test_a_group_that_ends_waits_for_no_thread_that_waits_for_it():
    """torch 2.7's gloo did, within the first few hundred."""
    assert warm.run(["-c", MANY], timeout=120).returncode == 0
