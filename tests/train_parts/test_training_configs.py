"""The configs of optimizer, schedules and trackers: torch-free, checked, and fit for their targets."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mm_core.errors import ConfigError
from mm_core.plugin.registry import build
from mm_core.train.lr_schedules import Cosine
from mm_core.train.trackers import JsonlTracker, TensorBoardTracker


def test_reading_them_imports_no_torch():
    script = "import sys, mm_core.builtin.configs.training\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_builds_by_its_name(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = build("optimizer", {"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.99]}, [parameter])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (1e-3, (0.9, 0.99))
    schedule = build("lr_schedule", {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}, 10)
    assert isinstance(schedule, Cosine) and schedule.factor(1) == 0.5
    assert build("lr_schedule", {"type": "constant"}, 10).factor(0) == 1.0
    assert isinstance(build("tracker", {"type": "jsonl"}, tmp_path), JsonlTracker)
    assert isinstance(build("tracker", {"type": "tensorboard"}, tmp_path), TensorBoardTracker)


@pytest.mark.parametrize(
    ("kind", "mapping", "words"),
    [
        ("optimizer", {"type": "adamw", "lr": -1.0}, "optimizer.lr: found -1.0, a number"),
        ("optimizer", {"type": "adamw", "betas": [0.9, 1.0]}, "optimizer.betas.1: found 1.0, a number"),
        ("lr_schedule", {"type": "cosine", "min_lr_ratio": 2.0}, "lr_schedule.min_lr_ratio: found 2.0"),
        ("lr_schedule", {"type": "constant", "warmup_steps": -1}, "lr_schedule.warmup_steps: found -1"),
        ("tracker", {"type": "tensorboard", "flush_secs": 0}, "tracker.flush_secs: found 0"),
    ],
)
def test_values_out_of_range_are_refused(kind, mapping, words):
    with pytest.raises(ConfigError) as caught:
        build(kind, mapping, object())
    assert words in str(caught.value)
