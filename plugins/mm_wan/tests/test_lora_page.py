"""docs/lora-for-comfyui.md is run: its config and its commands, on a tiny checkpoint and short clips."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image
from safetensors import safe_open
from wan_configs import environment

from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from mm_core.plan import base_choices, build_task
from support import pages, warm
from support.scripts import script

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/lora-for-comfyui.md"
TINY = {
    "config:wan/t2v_1_3b_lora": "config:wan/t2v_tiny_lora",
    "preset: wan2.1-t2v-14b, ": "",
    "hub:Wan-AI/": "ckpt/",
    "num_frames: 33": "num_frames: 9",
    "max_height: 480": "max_height: 48",
    "max_width: 832": "max_width: 64",
    "every: 250": "every: 1",
    "mode: variable}": "mode: variable}\n  validation: null",  # the tiny config's is of clips of one size
    "checkpoint:": "validation: null\ncheckpoint:",
    "steps: 1500": "steps: 2\n  micro_batch_size: 2",
    "keep: 4": "keep: 0",
}


def block(language: str, start: str = "") -> str:
    return next(b.text for b in pages.blocks(PAGE) if b.language == language and b.text.startswith(start))


@pytest.mark.slow
@pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_the_page_goes_from_clips_to_a_file(tmp_path):
    clips = tmp_path / "data/real_clips"
    script("examples/real_clips/prepare.py").prepare(clips)
    for index, row in enumerate(json.loads((clips / "data.json").read_text())):
        place = tmp_path / f"data/style/{index}.mp4"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes((clips / row["path"]).read_bytes())
        place.with_suffix(".txt").write_text("ohwx style")
    Image.new("RGB", (96, 64), "red").save(tmp_path / "data/style/photo.jpg")
    make_tiny_checkpoint(tmp_path / "ckpt/Wan2.1-T2V-14B-Diffusers", "t2v")
    text = block("yaml")
    for full, little in TINY.items():
        text = text.replace(full, little)
    text = text.replace("engine:\n", "engine:\n  param_dtype: bf16\n")
    (tmp_path / "style.yaml").write_text(text)
    lines = [line for b in pages.blocks(PAGE) if b.language == "bash" for line in b.text.splitlines()]
    for line in lines:
        words = shlex.split(line.replace("mm-train ", "mm train "))
        done = warm.run(["-m", "mm_core.cli.main", *words[1:]], cwd=tmp_path, env=environment())
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert len([*(tmp_path / "runs/style/exports").glob("step_*-comfyui.safetensors")]) == 2
    with safe_open(tmp_path / "style.safetensors", "pt") as held:
        assert held.metadata()["modelspec.trigger_phrase"] == "ohwx style"
        assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in held.keys()  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_its_table_is_that_of_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "style.yaml").write_text(block("yaml"))
    config = load_config(tmp_path / "style.yaml")
    assert build_task(config)
    rows = re.findall(r"^  (\S.*?) +([\d.]+) +([\d.]+)$", block("text", "the frozen base"), re.M)
    found = [
        (one.label, f"{one.device_bytes / 2**30:.2f}", f"{one.host_bytes / 2**30:.2f}")
        for one in base_choices(config, 1, {})
    ]
    assert found == rows
