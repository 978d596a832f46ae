"""Run by each rank: saves, fails and loads, and prints the outcome of each attempt, as one JSON object.

usage: checkpoint_ranks.py RUN_DIR STATE_SEED (two|three)
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from mm_core.runtime.launch.rank_process import leave
from support.checkpoints import make_state


def spread(state: dict, mesh) -> dict:
    """Sharded, replicated and plain tensors, and parameters that FSDP2 has sharded."""

    def place(name: str, tensor: torch.Tensor):
        if name.endswith("step"):
            return tensor.clone()
        return distribute_tensor(tensor, mesh, [Replicate() if name == "head" else Shard(0)])

    placed = {part: {name: place(name, t) for name, t in named.items()} for part, named in state.items()}
    layer = nn.Linear(5, 7)
    with torch.no_grad():
        layer.weight.copy_(state["model"]["blocks.0.weight"])
    fully_shard(layer, mesh=mesh)
    placed["model"]["blocks.0.weight"] = layer.weight
    return placed


def filled(state: dict, value: float) -> dict:
    return {part: {k: torch.full_like(v, value) for k, v in named.items()} for part, named in state.items()}


def whole(state: dict) -> dict:
    return {
        part: {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for k, v in named.items()}
        for part, named in state.items()
    }


def equal(left: dict, right: dict) -> bool:
    return all(torch.equal(left[part][name], right[part][name]) for part in right for name in right[part])


def attempt(work) -> str:
    try:
        work()
    except CheckpointError as fault:
        return str(fault)
    return "done"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def main() -> dict[str, object]:
    run, seed, case = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = make_state(seed)
    state, target = spread(wanted, mesh), spread(filled(wanted, 9.0), mesh)
    store = CheckpointStore(run, keep=2)
    said: dict[str, object] = {}
    newest = store.resolve("auto")
    if newest is not None:
        store.begin(store.load(newest, target)["step"])
        said["loaded what another world saved"] = equal(whole(target), wanted)
        target = spread(filled(wanted, 9.0), mesh)
    if case == "three":
        store.save(30, state, {}, "x: 1\n")
        return said
    good = store.save(20, state, {"seed": seed}, "x: 1\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    said["a full disk on rank 1"] = attempt(lambda: store.save(21, state, {}, "x: 1\n"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    said["left behind"] = sorted(path.name for path in store.folder.iterdir())
    facts = store.load(good, target)
    said["the last good one"] = [facts["seed"], facts["step"], equal(whole(target), wanted)]
    said["saved again"] = attempt(lambda: store.save(20, state, {}, "x: 1\n"))
    path = store.save(22, state, {}, "x: 1\n")
    dist.barrier()
    if dist.get_rank() == 0:
        flip(path / "__1_0.distcp")
    dist.barrier()
    said["a flipped bit"] = attempt(lambda: store.load(path, target))
    other = {"model": {"blocks.0.weight": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)])}}
    said["another model"] = attempt(lambda: store.load(good, other))
    mixed = good if dist.get_rank() == 0 else path
    said["two minds"] = attempt(lambda: store.load(mixed, target))
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = main()
    dist.barrier()
    print("SAID " + json.dumps(answer))
    leave(0)  # as real ranks do: torch's destructors abort now and then after saves by several ranks
