"""Run by each rank: shards a state dict as an FSDP2 trainer does, and saves it by torch's own function.

usage: foreign_ranks.py WEIGHTS.safetensors FOLDER PREFIX
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

weights, folder, prefix = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
tensors = {}
for place, (name, tensor) in enumerate(load_file(weights).items()):
    cut = place % max(1, tensor.ndim)  # some by rows, some by columns, as tensor parallelism cuts them
    tensors[prefix + name] = distribute_tensor(tensor, mesh, [Shard(cut)]) if tensor.ndim else tensor
state = {"model": tensors, "optimizer": {"step": torch.tensor(3.0)}, "iteration": 3, "args": {"lr": 1e-4}}
dcp.save(state, checkpoint_id=folder)
dist.destroy_process_group()
