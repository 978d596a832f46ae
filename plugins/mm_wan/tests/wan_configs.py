"""The YAMLs of the plugin: loaded, and run for few steps."""

from __future__ import annotations

import os
from pathlib import Path

import mm_core
from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from support import warm
from support.scripts import script

ROOT = Path(__file__).parents[3]


def config_at(name: str, *overrides: str):
    if not shards_mixed():
        overrides = ("train.base_dtype=null", *overrides)
    return load_config(ROOT / f"configs/wan/{name}.yaml", list(overrides))


def checkpoint_of(name: str) -> str:
    return config_at(name).task.options["predictor"].options["from_pretrained"]


def render_clips(folder: Path) -> None:
    script("examples/real_clips/prepare.py").prepare(folder)


def train(name: str, *overrides: str, code: int = 0) -> str:
    """mm-train, for fewer steps; what it prints."""
    fewer = ["train.steps=3", "checkpoint.every=3", "validation.every=3", "data.loader.workers=0"]
    command = ["train", "--config", f"{ROOT}/configs/wan/{name}.yaml", *fewer, *overrides]
    found = warm.mm(*command, env=environment())
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout + found.stderr


def environment() -> dict[str, str]:
    """For a child in another folder, which runs the core of this process, wherever it lies."""
    paths = [str(Path(mm_core.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
