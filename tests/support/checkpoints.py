"""Small checkpoints with odd shapes: empty shards, scalars, two dtypes; and access to their contents."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from mm_core.loading.checkpoint_source import CheckpointSource


def make_state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "model": {
            "blocks.0.weight": draw(7, 5),
            "blocks.0.bias": draw(1),
            "head": draw(4, 3, dtype=torch.bfloat16),
        },
        "optimizer": {"blocks.0.weight.exp_avg": draw(7, 5), "blocks.0.weight.step": torch.tensor(12.0)},
    }


def staged(path: Path) -> Path:
    """Path at which this process writes the new version of a file (mm_core.files.replacing)."""
    return path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")


def state_of(run: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """The tensors of a part of the newest checkpoint of a run."""
    source = CheckpointSource(run, part)
    found = {name: torch.empty(shape) for name, shape in source.shapes.items()}
    source.fill(found)
    return found


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, unsharded."""
    metadata = OpenedCheckpoint(step).metadata
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        part, _, name = key.partition(".")
        state.setdefault(part, {})[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.read_tensors(step, metadata, state, alone=True)
    return {f"{part}.{name}": tensor for part, named in state.items() for name, tensor in named.items()}


def chosen(store: CheckpointStore, request: str) -> tuple[Path | None, list[CheckpointError]]:
    """Folder of the checkpoint that `store.open` finds, and the errors of checkpoints that it skipped."""
    checkpoint, faults = store.open(request)
    return None if checkpoint is None else checkpoint.folder, faults
