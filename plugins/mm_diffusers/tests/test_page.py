"""The pages of image models and of further families run as they are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from support.logs import losses
from support.pages import ROOT, blocks

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch) -> None:
    """Photos of two sizes in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(6):
        picture = Image.new("RGB", ((64, 64), (96, 64))[number % 2], "white")
        ImageDraw.Draw(picture).ellipse((8, 8, 40, 40), fill=("red", "green", "blue")[number % 3])
        picture.save(f"photos/{number}.png")
        Path(f"photos/{number}.txt").write_text(f"a {('red', 'green', 'blue')[number % 3]} circle")


def run_page(name: str, *files: str) -> str:
    """Writes the files that a page shows, in its order, and runs its commands; returns what they print."""
    page = blocks(ROOT / "docs" / name)
    shown = [block.text for block in page if block.language in ("yaml", "python")]
    for file, text in zip(files, shown, strict=False):
        Path(file).write_text(text, encoding="utf-8")
    lines = "".join(block.text for block in page if block.language == "bash").splitlines()
    commands = "\n".join(line for line in lines if not line.startswith("pip install"))  # it is installed
    tools = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], env=os.environ | tools, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with Image.open(next(Path("pictures").glob("*red-circle*.png"))) as shown:
        assert shown.size == (64, 64)
    return done.stdout


def test_the_page_trains_samples_and_exports():
    run_page("diffusers.md", "z_image.yaml")
    assert len(load_file("lora.safetensors")) == 56


def test_a_family_is_added_by_its_page_alone():
    """Of two ranks, from a cache, in two halves."""
    printed = run_page("diffusers-family.md", "ovis.py", "ovis.yaml")
    assert "'velocity': 0.0" in printed and "1 component, 33 checks, 0 failures" in printed
    assert len(losses(Path("runs/ovis"))) == 4
    assert len(load_file("lora.safetensors")) == 12
