"""A task that reads its own `training` is evaluated in evaluation mode: in the run, and by `mm eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import mm_core
from mm_core.config.load import load_config

PLUGIN = """
from pathlib import Path

import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import DatasetBase, TaskModule

class Tones(DatasetBase):
    def __len__(self):
        return 12

    def sample_at(self, index, rng):
        return {"x": rng.normal((8,), "x")}


class Pitch(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def losses(self, batch):
        with Path(__file__).with_name("modes").open("a") as stream:
            print(self.training, self.net.training, torch.is_grad_enabled(), file=stream)
        return nn.functional.dropout(self.net(batch["x"]), 0.5, self.training)[:, 0].square()


@hookimpl
def mm_datasets():
    return [Component(name="tones", target="pitch:Tones")]


@hookimpl
def mm_tasks():
    return [Component(name="pitch", target="pitch:Pitch")]
"""


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> tuple[Path, float]:
    """A trained run, and the held-out loss after its last step."""
    folder = tmp_path_factory.mktemp("pitch")
    (folder / "pitch.py").write_text(PLUGIN)
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "plugins": {"path": ["pitch.py"]},
                "run": {"name": "pitch", "dir": str(folder)},
                "task": {"type": "local/pitch"},
                "data": {
                    "train": {"type": "local/tones"},
                    "validation": {"type": "local/tones"},
                    "loader": {"workers": 0},
                },
                "train": {"steps": 2, "micro_batch_size": 4, "global_batch_size": 12},
                "validation": {"every": 1},
            }
        )
    )
    mm_core.train(load_config(folder / "run.yaml"))
    step, pass_ = 3 * ["True True True"], 3 * ["False False False"]  # three batches of each
    assert (folder / "modes").read_text().splitlines() == [*step, *pass_, *step, *pass_]
    rows = [json.loads(line) for line in (folder / "pitch/metrics.jsonl").read_text().splitlines()]
    return folder / "pitch", [row["validation/loss"] for row in rows if "validation/loss" in row][-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks_finds_the_loss_that_validation_found(validated, mm, ranks):
    run, loss = validated
    done = mm("eval", "--run", run, "--nproc", ranks, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
