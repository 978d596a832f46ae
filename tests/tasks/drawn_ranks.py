"""Run by each rank: how models of Transformers begin under the engine.

usage: drawn_ranks.py OUT FOLDER ...    a folder holds config.json and, in `class`, the model's class
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError, PlanError
from mm_core.tasks.pretrained import model as pretrained_model
from support.rank_program import run_as_rank
from support.tiny_models import Task


class Table(nn.Module):
    """Quantised weights of three rows, of which the last is not set: of another rank than the first."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(3, 2, dtype=torch.int8), requires_grad=False)
        self.rows = rows

    def init_weights(self) -> None:
        mark = 0x57  # what the memory is marked with is as good a value as any other
        whole = torch.full((3, 2), mark if self.rows == 3 else 1, dtype=torch.int8)
        for held, row in zip(self.codes.to_local(), self.mine(), strict=True):
            if row < self.rows:
                held.copy_(whole[row])

    def mine(self) -> range:
        count = -(-3 // dist.get_world_size())
        return range(3)[dist.get_rank() * count : (dist.get_rank() + 1) * count]


def begin(model: nn.Module) -> None:
    """Has the engine spread a model and begin it."""
    task = Task(model=model)
    engine = FSDP2Engine()
    engine.prepare(task, engine.plan(task, dist.get_world_size(), 2), None, Randomness(7))


def began(model: nn.Module) -> dict[str, str]:
    """Hashes of all tensors of a model that has begun."""
    begin(model)
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        found[name] = hashlib.sha256(whole.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
    return found


def of_folder(folder: Path) -> dict[str, str] | str:
    auto_class = (folder / "class").read_text()
    wanted = PretrainedConfig(str(folder), auto_class, weights="random")
    try:
        with torch.device("meta"):
            model = pretrained_model.build_model(wanted, "model")
        return began(model)
    except PlanError as fault:  # a parameter without dimensions
        return fault.what


def tables() -> list[str]:
    """The outcome for tables that are set, and for one that is not set completely."""
    said = []
    for rows in (3, 2):
        with torch.device("meta"):
            model = Table(rows)
        try:
            begin(model)
            said.append("")
        except (ContractError, PlanError) as fault:
            said.append(fault.what)
    return said


def main(out: str, *folders: str) -> None:
    with patch.object(pretrained_model, "_made", wraps=pretrained_model._made) as made:
        found: dict[str, object] = {Path(folder).name: of_folder(Path(folder)) for folder in folders}
    found["built"] = made.call_count
    found["tables"] = tables()
    torch.save(found, f"{out}.{dist.get_rank()}")


if __name__ == "__main__":
    run_as_rank(main)
