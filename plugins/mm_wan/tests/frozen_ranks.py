"""Run by each rank: the frozen encoders of a tiny Wan, placed, and what they make of captions and a clip.

usage: frozen_ranks.py OUT FOLDER PLACEMENT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from mm_wan.encoders.umt5 import WanUMT5
from mm_wan.encoders.vae import WanVAE
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.frozen import FrozenFiles
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave

NAMES = ("autoencoder", "text_encoder")


class Task(nn.Module):
    trainable, frozen = (), NAMES

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.autoencoder = WanVAE(folder)
        self.text_encoder = WanUMT5(folder, max_length=20, dtype="fp32")


def main() -> None:
    out, folder, placement = sys.argv[1:]
    start_process_group()
    torch.set_num_threads(1)
    with torch.device("meta"):
        task = Task(folder)
    components = {name: task.get_submodule(name) for name in NAMES}
    for component in components.values():
        component.build_empty()
    engine = FSDP2Engine(frozen=dict.fromkeys(NAMES, placement))
    plan = engine.plan(task, dist.get_world_size(), 0)
    engine.place_frozen(task, plan, FrozenFiles(components, get_registry(())))
    rank = dist.get_rank()
    # Ranks have captions and clips of other lengths.
    captions = ["a red circle", "a blue square moves left"][: rank + 1]
    pixels = torch.rand(1, 3, 5 + 4 * rank, 32, 32, generator=torch.Generator().manual_seed(rank)) * 2 - 1
    hidden, _ = task.text_encoder.encode(*task.text_encoder.tokenizer()(captions))
    latents = task.autoencoder.encode(pixels).mode()
    made = {"hidden": hidden, "latents": latents, "pixels": task.autoencoder.decode(latents)}
    held = {name: sum(held_bytes(p) for p in part.parameters()) for name, part in components.items()}
    torch.save({"made": made, "held": held, "plan": plan.frozen}, f"{out}.{rank}")
    dist.barrier()


def held_bytes(parameter: torch.Tensor) -> int:
    """That this rank keeps of it between calls."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.untyped_storage().size()


if __name__ == "__main__":
    main()
    leave(0)
