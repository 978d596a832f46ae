"""The commands of docs/cache.md, and its table of keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from mm_core.config.sections import CacheSection
from support import warm
from support.pages import ROOT, blocks

PAGE = ROOT / "docs/cache.md"
COMMANDS = [line.partition("#")[0].split() for line in blocks(PAGE)[0].text.splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    base = yaml.safe_load((ROOT / "configs/custom_dit/quickstart.yaml").read_text())
    base["data"]["train"] = {"type": "shapes", "clips": 20, "num_frames": 8, "height": 16, "width": 16}
    base["train"] |= {"steps": 1}
    base["lr_schedule"] = {"type": "constant"}
    base["log"] = {"trackers": []}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base))
    shown = []
    for program, *arguments in COMMANDS:
        own = ["train", *arguments] if program == "mm-train" else arguments
        found = warm.mm(*own, cwd=tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr
        shown.append(found.stdout + found.stderr)
    assert "encoded 20 latents" in shown[0] and "not loaded: autoencoder, text_encoder" in shown[2]
    assert "removed 0 entries" in shown[3]


def test_the_table_has_every_key_with_its_default() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {row.split("`")[1]: row.split("|")[2].strip().strip("`") for row in rows if row.count("|") == 4}
    for field in dataclasses.fields(CacheSection):
        assert listed[field.name] == str(field.default)
