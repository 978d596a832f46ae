"""docs/lora-for-comfyui.md is run: its config and its commands, on a tiny checkpoint and short clips."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
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
    (tmp_path / "style.yaml").write_text(block("yaml"))
    (tmp_path / "try.yaml").write_text(block("yaml", "include: style.yaml"))
    lines = [line for b in pages.blocks(PAGE) if b.language == "bash" for line in b.text.splitlines()]
    install, *lines = lines
    assert install.startswith('pip install "./[lora]" ./plugins/mm_wan ')
    for line in lines:
        used = line if "--dry-run" in line else line.replace("style.yaml", "try.yaml")
        words = shlex.split(used.replace("mm-train ", "mm train ").replace("runs/style", "runs/try"))
        program = words[1:] if words[0] == "python" else ["-m", "mm_core.cli.main", *words[1:]]
        done = warm.run(program, cwd=tmp_path, env=environment())
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "pictures/contact_sheet.png").is_file()
    assert len([*(tmp_path / "runs/try/exports").glob("step_*-comfyui.safetensors")]) == 2
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
