"""Answers in words of a tiny InternVL: `mm sample`, `mm chat`, rows of a file, evaluations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from mm_internvl.testing import make_tiny_checkpoint

import mm_core
from mm_core.cli.main import main


def of_tests(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data, runs = of_tests("internvl_data"), of_tests("internvl_runs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of a few steps on tiny pictures: its answers depend on the images, and are no words."""
    top = tmp_path_factory.mktemp("answers")
    model = make_tiny_checkpoint(top / "model")
    data.draw(top / "files")
    rows = data.write(top / "files" / "rows.jsonl", data.ROWS)
    train = {"type": "internvl/conversations", "processor": str(model), "max_length": 400, "max_tiles": 2}
    train |= {"frames": 3, "sources": [{"annotations": str(rows)}]}
    config = runs.config_of(top, model, data={"train": train, "loader": {"workers": 0}})
    mm_core.train(config)
    return top


def mm(capsys, *words: object) -> str:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_sample_answers(place, capsys):
    run = place / "runs" / "tuned"
    print(mm(capsys, "sample", "--run", run, "--prompt", "what?", "--image", place / "files" / "a.png"))
