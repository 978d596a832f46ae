"""The full-size run of the tutorial: Wan's parts, a plan without files; without mm-wan it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mm_custom_dit.model import CustomDiT

from mm_core.config.load import load_config
from mm_core.plan import build_task, make_plan

CONFIG = Path(__file__).parents[1] / "mm_custom_dit/configs/t2v_1_3b.yaml"


def test_the_plan_is_of_wans_size_on_wans_latents():
    wan = pytest.importorskip("mm_wan.encoders.vae")
    config = load_config(CONFIG)
    task = build_task(config)
    assert isinstance(task.predictor, CustomDiT) and isinstance(task.autoencoder, wan.WanVAE)
    plan = make_plan(config, 8, task)
    types = {component.key: component.type for component in plan.components}
    assert (types["task.autoencoder"], types["task.text_encoder"]) == ("wan/vae", "wan/umt5")
    assert types["task.scheduler"] == "wan/flow_match"
    assert plan.modules[0].parameters == 1_418_996_800  # as Wan-AI/Wan2.1-T2V-1.3B
    assert plan.flops is not None
    assert plan.flops.useful == pytest.approx(8 * 3.858e14, rel=1e-4)
    wanted = {Path(file.path).parent.name for file in plan.missing if not file.of_data}
    assert wanted == {"vae", "text_encoder", "tokenizer"}


def test_without_mm_wan_the_config_names_what_it_needs():
    environment = {**os.environ, "MM_PLUGINS_DISABLE": "wan"}
    command = [sys.executable, "-m", "mm_core.cli.main", "validate", str(CONFIG)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode != 0
    for name in ("wan/vae", "wan/umt5", "wan/flow_match"):
        assert name in found.stderr
    assert "Traceback" not in found.stderr
    print(found.stderr)
