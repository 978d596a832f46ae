"""Run by each rank: 8-bit AdamW over shards of unequal sizes, saved in the background and resumed.

usage: adamw_8bit_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mm_core.checkpoint.store import CheckpointStore
from mm_core.optim.adamw_8bit import adamw_8bit
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave

# Two ranks hold 64 and 64 rows, 1 and 0, 2 and 1.
SHAPES = {"matrix": (128, 64), "one_row": (1, 2, 64), "odd": (3, 64)}
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def drawn(name: str, seed: int) -> DTensor:
    generator = torch.Generator().manual_seed(seed)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.randn(SHAPES[name], generator=generator), mesh, [Shard(0)])


def begin() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = {name: nn.Parameter(drawn(name, 0)) for name in SHAPES}
    return parameters, adamw_8bit([{"params": list(parameters.values())}], **SETTINGS)


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, parameter in parameters.items():
        parameter.grad = drawn(name, number)
    optimizer.step()


def state_of(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict:
    moments = {
        f"{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {"model": {name: parameter.data for name, parameter in parameters.items()}, "optimizer": moments}


def numbers(state: dict) -> dict[str, list[torch.Tensor]]:
    """Every number of this rank's share, those of packed tensors as they are packed."""
    found = {}
    for part, named in state.items():
        for name, tensor in named.items():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            packed = [own.codes, own.scale, own.qmap] if hasattr(own, "codes") else [own]
            found[f"{part}.{name}"] = [values.detach().clone() for values in packed]
    return found


def equal(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    same = [all(map(torch.equal, one[name], other[name])) for name in one]
    return one.keys() == other.keys() and all(same)


def main(folder: Path) -> None:
    start_process_group()
    parameters, optimizer = begin()
    for number in (1, 2):
        step(parameters, optimizer, number)
    assert any(len(values) == 3 for values in numbers(state_of(parameters, optimizer)).values())
    store = CheckpointStore(folder, 3, asynchronous=True)
    store.begin(0)
    store.reserve(state_of(parameters, optimizer))
    saved = numbers(state_of(parameters, optimizer))
    path = store.save(2, state_of(parameters, optimizer), {}, "")
    step(parameters, optimizer, 3)  # while it is written
    store.wait()

    resumed, again = begin()
    step(resumed, again, 7)  # makes the moments
    store.load(path, state_of(resumed, again))
    assert equal(numbers(state_of(resumed, again)), saved), "what was saved is what was loaded"
    step(resumed, again, 3)
    assert equal(numbers(state_of(resumed, again)), numbers(state_of(parameters, optimizer)))
    store.close()
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
