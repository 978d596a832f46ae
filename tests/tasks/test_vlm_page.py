"""The page on vision-language models runs as it is shown, and its rows are read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mm_core.cli.main import main
from mm_core.tasks.conversations.rows.reading import conversation
from support.logs import losses
from support.pages import ROOT, blocks

BLOCKS = blocks(ROOT / "docs" / "vlm.md")
OTHERS = {
    "pip install ./plugins/mm_internvl": "python -c 'import mm_internvl'",
    "runs/charts": "runs/tiny",
    " a.png": " data/digits/0000.png",
    " b.png": " data/digits/0001.png",
    "rows.jsonl": "data/digits/conversations.jsonl",
    "--nproc 4": "--nproc 2",
    "--out charts --merge-lora": "--out charts",
    "mm sample": "mm sample --max-new-tokens 3",
    "mm chat": "printf 'what is it?\\n/quit\\n' | mm chat --max-new-tokens 3",
}
"""What the commands on a run of one's own are called with here."""


@pytest.mark.slow
def test_the_page_trains_asks_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        if block.language == "yaml" and block.text.startswith("# "):
            name = block.text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(block.text, encoding="utf-8")
    commands = "".join(block.text for block in BLOCKS if block.language == "bash")
    for shown, used in OTHERS.items():
        assert shown in commands
        commands = commands.replace(shown, used)
    tools = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], env=os.environ | tools, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which digit?<|im_end|>" in done.stdout and "[[4<|im_end|>]]" in done.stdout
    assert losses(Path("runs/tiny"))[-1] < losses(Path("runs/tiny"))[0]
    assert len(Path("answers.jsonl").read_text().splitlines()) == 40
    assert main(["validate", "vlm.yaml"]) == 0


def test_the_rows_of_the_page_are_read(tmp_path):
    (text,) = (block.text for block in BLOCKS if block.language == "json")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [conversation(json.loads(line), "here") for line in text.splitlines()]
    assert [[kind for kind, _ in row.media] for row in rows] == [["image"]] * 4
    assert [turn.role for turn in rows[3].turns] == ["user", "assistant"] * 2


@pytest.mark.slow
def test_tiny_models_of_other_families_are_made_by_the_command_of_the_page(tmp_path):
    page = (ROOT / "docs" / "vlm.md").read_text()
    command, folder = re.search(r"`PYTHONPATH=tests python (-m .*?)` writes a tiny\n`(.*?)`", page).groups()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, *command.split()], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        f.name for f in (tmp_path / folder).iterdir()
    }
