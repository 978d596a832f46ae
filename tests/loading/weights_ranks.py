"""Run by each rank: a tiny Transformers model with tied weights, started from a folder, trained two steps.

usage: weights_ranks.py OUT FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mm_core.builtin.configs.training import AdamWConfig
from mm_core.config.sections import DataSection, RunConfig, RunSection, TrainSection
from mm_core.contracts import Loss, Randomness, WeightsFrom
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.optim.adamw import adamw
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.schema.fields import ComponentConfig
from support.tensors import all_whole
from support.tiny_models import Task


class LanguageModel(nn.Module):
    """A component with weights of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.weights_from = WeightsFrom(folder)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def init_weights(self) -> None:
        """The rotary table is computed; everything else is in the folder."""
        rotary = self.model.model.rotary_emb
        table = 1.0 / rotary.config.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
        for buffer in rotary.buffers():
            buffer.copy_(table)


def main() -> None:
    start_process_group()
    torch.set_num_threads(1)
    with torch.device("meta"):
        task = Task(text=LanguageModel(sys.argv[2]))
    engine = FSDP2Engine(sub_modules_to_wrap=("text.model.model.layers.{*}",), param_dtype=None)
    config = RunConfig(
        RunSection("weights"),
        ComponentConfig("task", "core/text_to_video"),
        DataSection(ComponentConfig("dataset", "core/video_text")),
        TrainSection(steps=2),
    )
    weights = FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters)
    plan = engine.plan(task, dist.get_world_size(), 2)
    names: list[str] = []

    def optimizer(parameters):
        names.extend(parameters)
        return adamw([{"params": [*parameters.values()]}], **(asdict(AdamWConfig()) | {"lr": 1e-2}))

    engine.prepare(task, plan, optimizer, Randomness(0), weights)
    loaded = all_whole(engine.state_dict()["model"])
    rows = torch.arange(32).view(4, 8)[dist.get_rank() :: dist.get_world_size()]
    for _ in range(2):
        scale = 1 / len(rows) if dist.get_world_size() > 1 else 1 / 4
        engine.micro_step(
            lambda: Loss(sum(task.text(row[None]) for row in rows), 4.0), last=True, scale=scale
        )
        engine.step(engine.grad_norm(), None)
    trained = all_whole(engine.state_dict()["model"])
    embedding = task.text.model.model.embed_tokens.weight
    assert task.text.model.lm_head.weight is embedding, "still one parameter"
    if dist.get_rank() == 0:
        torch.save(
            {"loaded": loaded, "trained": trained, "names": names, "notes": weights.notes()}, sys.argv[1]
        )
    dist.barrier()


if __name__ == "__main__":
    assert Path(sys.argv[2]).is_dir()
    main()
    leave(0)
