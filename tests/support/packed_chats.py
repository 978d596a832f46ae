"""Tiny vision-language models in the task `pretrained`, with packed rows of conversations about pictures."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.contracts import SampleKey, TextBatch
from mm_core.tasks import Conversations
from mm_core.tasks.pretrained.task import PretrainedTask
from support.chat_models import save_chat_model
from support.chat_rows import make_chat_rows

AUTO = "AutoModelForImageTextToText"


def made(folder: Path, name: str) -> Path:
    """The folder of a tiny model, and beside it `rows/chat.jsonl`; made when first asked for."""
    if not (folder / "rows").exists():
        make_chat_rows(folder / "rows")
    return folder / name if (folder / name).exists() else save_chat_model(name, folder)


def chats(model: Path, packing: bool, max_length: int = 600) -> Conversations:
    source = ConversationSource(str(model.parent / "rows" / "chat.jsonl"))
    return Conversations([source], str(model), max_length=max_length, packing=packing)


def batch_of(data: Conversations, samples: list[dict]) -> TextBatch:
    """Samples as the loader collates them."""
    return data.collate(
        [{"key": SampleKey(0, n), "weight": 1.0, "answers": (), **s} for n, s in enumerate(samples)]
    )


def task_of(model: Path, **options) -> PretrainedTask:
    """The task of a model folder, with its weights, on the CPU."""
    task = PretrainedTask(str(model), AUTO, **options)
    theirs = getattr(transformers, AUTO).from_pretrained(model).state_dict()
    buffers = dict(task.named_buffers())
    task.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            parameter.copy_(theirs[name])
        for name, buffer in task.named_buffers():
            buffer.copy_(buffers[name])
    task.model.tie_weights()
    return task.train()
