"""The page docs/deepspeed.md: its JSON files, its YAML and its commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mm_deepspeed.config import DeepSpeedConfig
from mm_deepspeed.settings import Settings, completed

from mm_core.contracts import TrainingFacts
from mm_core.plugin import ComponentConfig
from support.pages import ROOT, blocks

PAGE = ROOT / "docs/deepspeed.md"
JSON = [block.text for block in blocks(PAGE) if block.language == "json"]
RUN = f"""
include: {ROOT}/configs/custom_dit/quickstart.yaml
run: {{name: zero}}
task: {{predictor: {{num_layers: 1}}}}
data: {{train: {{type: shapes, num_frames: 8, height: 16, width: 16, clips: 8}}, loader: {{workers: 0}}}}
lr_schedule: {{warmup_steps: 0}}
train: {{steps: 2, micro_batch_size: 2, global_batch_size: 4}}
checkpoint: {{every: 1}}
"""


def facts() -> TrainingFacts:
    optimizer = ComponentConfig("optimizer", "core/adamw", {"lr": 1e-3})
    return TrainingFacts(10, 2, 4, 1, 1.0, optimizer, ComponentConfig("lr_schedule", "core/constant", {}))


@pytest.mark.parametrize("text", JSON)
def test_a_json_of_the_page_is_accepted_here_and_by_deepspeed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed import DeepSpeedConfig as Theirs

    settings = DeepSpeedConfig(settings=json.loads(text)).settings
    assert Theirs(completed(settings, facts())).zero_config.stage == Settings.of(settings).stage


def test_there_is_a_json_for_each_stage() -> None:
    assert {Settings.of(json.loads(text)).stage for text in JSON} == {0, 1, 2, 3}


def command(line: str, folder: Path) -> str:
    words = [str(Path(sys.executable).parent / line.split()[0]), *line.split()[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_yaml_and_the_commands_of_the_page_run(tmp_path: Path) -> None:
    (engine,) = (block.text for block in blocks(PAGE) if block.language == "yaml")
    install, resume = (block.text.strip() for block in blocks(PAGE) if block.language == "bash")
    (tmp_path / "ds.json").write_text(JSON[2])
    (tmp_path / "run.yaml").write_text(f"{RUN}\n{engine}")
    quiet = "--dry-run --no-deps --no-build-isolation --no-index"
    assert "mm-deepspeed-0.1.0" in command(install.replace("install", f"install {quiet}"), ROOT)
    assert "step 2/2" in command("mm-train --config run.yaml", tmp_path)
    assert "resumed" in command(f"{resume} train.steps=3", tmp_path)
