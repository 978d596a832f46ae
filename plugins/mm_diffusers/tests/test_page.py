"""The page of image models runs as it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from support.pages import ROOT, blocks

pytestmark = pytest.mark.slow


def test_the_page_trains_samples_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs/diffusers.md")
    (config,) = (block.text for block in page if block.language == "yaml")
    (commands,) = (block.text for block in page if block.language == "bash")
    Path("z_image.yaml").write_text(config, encoding="utf-8")
    Path("photos").mkdir()
    for number in range(6):
        picture = Image.new("RGB", ((64, 64), (96, 64))[number % 2], "white")
        ImageDraw.Draw(picture).ellipse((8, 8, 40, 40), fill=("red", "green", "blue")[number % 3])
        picture.save(f"photos/{number}.png")
        Path(f"photos/{number}.txt").write_text(f"a {('red', 'green', 'blue')[number % 3]} circle")
    tools = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], env=os.environ | tools, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(load_file("lora.safetensors")) == 24
    with Image.open(next(Path("pictures").glob("*red-circle*.png"))) as shown:
        assert shown.size == (64, 64)
