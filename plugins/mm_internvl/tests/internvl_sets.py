"""Conversations about drawn pictures as a dataset, its batches, and what a tiny model makes of them."""

from __future__ import annotations

from pathlib import Path

import internvl_data as data
import pytest
import torch
from mm_internvl.data.config import Source
from mm_internvl.data.conversations import Conversations
from mm_internvl.testing import TOKENS, make_tiny_checkpoint
from transformers import AutoModelForImageTextToText

from mm_core.contracts import DataRanks, Randomness
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.modules.initialise import initialise
from mm_core.tasks.pretrained.task import PretrainedTask


def make(top: Path) -> Path:
    """A folder with a tiny model, pictures, and rows about them."""
    make_tiny_checkpoint(top / "model")
    data.draw(top / "files")
    data.write(top / "files" / "rows.jsonl", data.ROWS)
    return top


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make(tmp_path_factory.mktemp("conversations"))


def dataset(place: Path, rows: str | list = "files/rows.jsonl", **options) -> Conversations:
    if not isinstance(rows, str):
        data.write(place / "files" / "own.jsonl", rows)
        rows = "files/own.jsonl"
    options = {"max_length": 400, "max_tiles": 4, "frames": 3, **options}
    return Conversations((Source(str(place / rows)),), str(place / "model"), **options)


def said(found: Conversations, sample: dict) -> str:
    """A sample's tokens as text, tiles as their number."""
    text = found.chat.tokenizer.decode(torch.cat([piece["input_ids"] for piece in sample["pieces"]]))
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
