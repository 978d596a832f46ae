"""The configs of optimizer, schedules and trackers: without torch, checked, and accepted by their targets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.errors import ConfigError
from mm_core.modules.patterns import freeze
from mm_core.optim.lr_schedules import Schedule
from mm_core.optim.parameter_groups import groups_of
from mm_core.plan import build_task
from mm_core.plugin.registry import build
from mm_core.telemetry.trackers.local import JsonlTracker, TensorBoardTracker

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/optimizers.md"
QUICKSTART = ROOT / "plugins/mm_custom_dit/mm_custom_dit/configs/quickstart.yaml"


def test_reading_them_imports_no_torch():
    script = "import sys, mm_core.builtin.configs.training\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_yaml_of_the_page_fits_the_quickstart(tmp_path):
    whole, muon = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    for name, text in (("whole", whole), ("muon", muon)):
        (tmp_path / f"{name}.yaml").write_text(f"include: {QUICKSTART}\n{text}", encoding="utf-8")
    config = load_config(tmp_path / "whole.yaml")
    task = build_task(config)
    frozen = freeze(task, config.train.freeze)
    assert frozen and all(name.startswith("predictor.blocks.") for name in frozen)
    parameters = {name: p for name, p in task.named_parameters() if p.requires_grad}
    groups = groups_of(parameters, config.train)
    assert [(group.get("lr_scale"), group.get("weight_decay")) for group in groups] == [
        (None, None),
        (None, 0.0),
        (0.1, 0.0),
    ]
    assert config.registry.build("optimizer", config.optimizer, groups).defaults["lr"] == 1e-4
    schedule = config.registry.build("lr_schedule", config.lr_schedule, config.train.steps, 1e-4)
    assert (schedule.warmup_steps, schedule.decay_from, schedule.floor) == (400, 16000, pytest.approx(0.01))
    if hasattr(torch.optim, "Muon"):
        config = load_config(tmp_path / "muon.yaml")
        optimizer = config.registry.build("optimizer", config.optimizer, groups_of(parameters, config.train))
        by_adamw = [name for group in optimizer.param_groups if "betas" in group for name in group["names"]]
        assert {"predictor.patch_embedding.weight", "predictor.proj_out.weight"} <= set(by_adamw)


def test_each_builds_by_its_name(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [parameter], "names": ["weight"]}]
    optimizer = build("optimizer", {"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.99]}, groups)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (1e-3, (0.9, 0.99))
    for kind in ("constant", "linear", "cosine", "polynomial", "wsd"):
        schedule = build("lr_schedule", {"type": kind, "warmup_steps": 2}, 10, 1e-3)
        assert isinstance(schedule, Schedule) and (schedule.factor(1), schedule.factor(2)) == (0.5, 1.0)
    ending = build("lr_schedule", {"type": "cosine", "min_lr": 1e-4}, 10, 1e-3).factor(10)
    assert ending == pytest.approx(0.1)
    for name, kind in (("jsonl", JsonlTracker), ("tensorboard", TensorBoardTracker)):
        tracker = build("tracker", {"type": name}, tmp_path)
        assert isinstance(tracker, kind)
        tracker.close("done")


@pytest.mark.parametrize(
    ("kind", "mapping", "words"),
    [
        ("optimizer", {"type": "adamw", "lr": -1.0}, "optimizer.lr: found -1.0, a number"),
        ("optimizer", {"type": "adamw", "betas": [0.9, 1.0]}, "optimizer.betas.1: found 1.0, a number"),
        ("optimizer", {"type": "muon", "ns_steps": 0}, "optimizer.ns_steps: found 0"),
        ("optimizer", {"type": "muon", "adjust_lr": "none"}, "optimizer.adjust_lr: found 'none'"),
        ("optimizer", {"type": "adamw_8bit", "eps": -1.0}, "optimizer.eps: found -1.0"),
        ("lr_schedule", {"type": "cosine", "min_lr": -2.0}, "lr_schedule.min_lr: found -2.0"),
        ("lr_schedule", {"type": "wsd", "decay_shape": "steep"}, "lr_schedule.decay_shape: found 'steep'"),
        ("lr_schedule", {"type": "polynomial", "power": 0}, "lr_schedule.power: found 0"),
        (
            "lr_schedule",
            {"type": "linear", "warmup_steps": 3, "warmup_fraction": 0.1},
            "warmup_steps and warmup_fraction are both set; remove one of them",
        ),
        ("lr_schedule", {"type": "constant", "warmup_steps": -1}, "lr_schedule.warmup_steps: found -1"),
        ("tracker", {"type": "tensorboard", "flush_secs": 0}, "tracker.flush_secs: found 0"),
    ],
)
def test_values_out_of_range_are_refused(kind, mapping, words):
    with pytest.raises(ConfigError) as caught:
        build(kind, mapping, object())
    assert words in str(caught.value)
