"""A run of few steps about tiny pictures, and what commands print about it."""

from __future__ import annotations

import json
from pathlib import Path

import internvl_runs as runs
import pytest
from mm_internvl.testing import make_tiny_checkpoint

import mm_core
from mm_core.cli.main import main
from support import conversation_rows as data

QUESTIONS = [
    data.asked("what is red?", "a colour"),
    data.asked("<image>\nwhat is this?", image="a.png", answers=["a picture", "an image"]),
    data.asked("<image>\nwhat?", image="missing.png"),
    data.asked("<video>\nwhat is in it?", "a circle", "and?", "a square", video="clip.mp4"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of few steps about tiny pictures: its answers depend on them, and are hardly words."""
    top = tmp_path_factory.mktemp("answers")
    model = make_tiny_checkpoint(top / "model")
    data.draw(top / "files")
    rows = data.write(top / "files" / "rows.jsonl", data.ROWS)
    train = {"type": "internvl/conversations", "processor": str(model), "max_length": 400, "max_tiles": 2}
    train |= {"frames": 3, "sources": [{"annotations": str(rows)}]}
    sections = {"data": {"train": train, "loader": {"workers": 0}}, "optimizer": {"lr": 2e-3}}
    mm_core.train(runs.config_of(top, model, train={"steps": 2}, **sections))
    return top


@pytest.fixture
def run(place):
    return place / "runs" / "tuned"


def mm(capsys, *words: object, code: int = 0) -> str:
    """What the command prints; of one that fails, on stderr."""
    capsys.readouterr()
    found = main([str(word) for word in words])
    said = capsys.readouterr()
    assert found == code, said.err
    return said.err if code else said.out


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
