"""Conversations about drawn pictures as a dataset, its batches, and what a tiny model makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import yaml
from mm_internvl.testing import TOKENS, make_tiny_checkpoint
from transformers import AutoModelForImageTextToText

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.config.load import load_config
from mm_core.contracts import IGNORED_LABEL, DataRanks, Randomness
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.media.readers import PyAVReader
from mm_core.modules.initialise import initialise
from mm_core.tasks import Conversations, Encoded, MediaReader
from mm_core.tasks.conversations.chat import Chat
from mm_core.tasks.conversations.processor import ChatProcessor
from mm_core.tasks.conversations.rows.reading import conversation
from mm_core.tasks.pretrained.task import PretrainedTask
from support import conversation_rows as data


def make(top: Path) -> Path:
    """A folder with a tiny model, pictures, and rows about them."""
    file = make_tiny_checkpoint(top / "model") / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_patches": 2}))  # the library cuts
    data.draw(top / "files")
    data.write(top / "files" / "rows.jsonl", data.ROWS)
    return top


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make(tmp_path_factory.mktemp("conversations"))


def dataset(
    place: Path, rows: str | list = "files/rows.jsonl", cls: type[Conversations] = Conversations, **options
) -> Conversations:
    if not isinstance(rows, str):
        data.write(place / "files" / "own.jsonl", rows)
        rows = "files/own.jsonl"
    options = {"max_length": 400, "frames": 3, **options}
    return cls((ConversationSource(str(place / rows)),), str(place / "model"), **options)


def said(found: Conversations, sample: dict) -> str:
    """A sample's tokens as text, tiles as their number."""
    text = found.chat.processor.tokenizer.decode(
        torch.cat([piece.of("input_ids") for piece in sample["pieces"]])
    )
    for tiles in range(8, 0, -1):
        text = text.replace("<IMG_CONTEXT>" * TOKENS * tiles, f"{tiles}")
    return text


def loaded(
    found: Conversations,
    size: int,
    steps: range = range(1),
    whole: int | None = None,
    seed: int = 3,
    rank: int = 0,
    ranks: int = 1,
) -> MicroBatchLoader:
    plan = BatchPlan(len(found), size, whole or size, seed, "random", drop_last=False)
    return MicroBatchLoader(
        found,
        plan,
        batch_transform=None,
        rng=Randomness(seed),
        share=DataRanks(rank, ranks),
        steps=steps,
        workers=0,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )


def task_of(place) -> PretrainedTask:
    """The task `pretrained` on the tiny model, in float64."""
    with torch.device("meta"):
        made = PretrainedTask(str(place / "model"), "AutoModelForImageTextToText")
    made.model.to_empty(device="cpu")
    initialise(made.model, "model", Randomness(1))
    weights = AutoModelForImageTextToText.from_pretrained(place / "model").state_dict()
    made.model.load_state_dict(weights)
    return made.double()


def sums(task, batches):
    """(loss as a sum, labels, gradients) over batches."""
    total, weight = 0.0, 0.0
    for batch in batches:
        batch.inputs["pixel_values"] = batch.inputs["pixel_values"].double()
        counted = task.batch_transform()(batch)
        found = task.loss(task.prepare(counted, Randomness(1)))
        found.total.backward()
        total, weight = total + float(found.total.detach()), weight + found.weight
    grads = {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
    return total, weight, grads


def near(found, wanted):
    assert found[1] == wanted[1]
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, gradient in wanted[2].items():
        error = (found[2][name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < 1e-5, name


def pixels_of(sample: dict) -> torch.Tensor:
    """All tiles of a sample, in order."""
    return torch.cat(
        [torch.empty(0, 3, 56, 56), *(p.vision["pixel_values"] for p in sample["pieces"] if p.vision)]
    )


def chat_of(folder: Path, max_length: int = 400, **options) -> Chat:
    """The core's own view of a model's folder."""
    return Chat(ChatProcessor(str(folder), MediaReader(3, 10**6, PyAVReader()), **options), max_length)


def read_by(chat: Chat, row: object, files: Sequence[Path] = ()) -> Encoded:
    """A row about these images, by their headers."""
    return chat.row(conversation(row, "row"), [("image", file) for file in files], "row", pixels=False)[0]


def learnt_by(chat: Chat, row: object) -> tuple[str, str]:
    """(all that the model reads, all that it learns), as text."""
    found, decode = read_by(chat, row), chat.processor.tokenizer.decode
    learnt = [token for token in found.of("labels").tolist() if token != IGNORED_LABEL]
    return decode(found.of("input_ids").tolist()), decode(learnt)


def config_of(
    tmp_path: Path,
    folder: Path,
    rows: Path | None = None,
    name: str = "tuned",
    dataset: Mapping[str, object] = MappingProxyType({"type": "conversations"}),
    auto_class: str = "AutoModelForImageTextToText",
    **sections,
):
    """A run that begins with a folder; without rows, one that could not train."""
    document = {
        "run": {"name": name, "dir": str(tmp_path / "runs")},
        "task": {"type": "pretrained", "from_pretrained": str(folder), "auto_class": auto_class},
        "data": {
            "train": {
                "processor": str(folder),
                "sources": [{"annotations": str(rows or tmp_path / "none.jsonl")}],
                "max_length": 128,
                **dataset,
            },
            "loader": {"workers": 0},
        },
        "engine": {"type": "fsdp2"},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "train": {"steps": 5, "micro_batch_size": 2, "global_batch_size": 4},
        "checkpoint": {"every": 5, "async": False},
    }
    for section, options in sections.items():
        document[section] = {**document.get(section, {}), **options}
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(file)
