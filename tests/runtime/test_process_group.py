"""A process group ends, also where one follows the other."""

from __future__ import annotations

import pytest

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


@pytest.mark.slow
def test_the_next_group_computes_in_its_own_groups():
    """torch caches the mesh of results, which equals that of the next process group."""
    assert warm.run(["-c", MESHES], timeout=60).returncode == 0


@pytest.mark.slow
def test_a_group_that_ends_waits_for_no_thread_that_waits_for_it():
    """torch 2.7's gloo did, within the first few hundred."""
    assert warm.run(["-c", MANY], timeout=120).returncode == 0
