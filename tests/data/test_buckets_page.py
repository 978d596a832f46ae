"""The examples of docs/buckets.md: each config is planned on small files, at a sixteenth of its sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from mm_core.builtin.tiny import write_clip
from mm_core.cli.main import main
from support.pages import ROOT, blocks

PAGE = blocks(ROOT / "docs/buckets.md")
CONFIGS = [block.text for block in PAGE if block.language == "yaml"]
SIDES = {"height", "width", "max_height", "max_width"}


def smaller(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: smaller(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [smaller(each) for each in value]
    return value // 16 if key in SIDES and isinstance(value, int) else value


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_config_has_buckets(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/photos").mkdir(parents=True)
    Image.new("RGB", (187, 125)).save("data/photos/dog.jpg")
    Path("data/photos/dog.txt").write_text("a dog")
    rows = []
    for name, shape in (("wide", (5, 30, 52, 3)), ("high", (5, 52, 30, 3))):
        write_clip(Path(f"data/{name}.mp4"), torch.zeros(*shape, dtype=torch.uint8), 8)
        rows.append({"path": f"{name}.mp4", "cap": name})
    Path("data/clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = smaller(yaml.safe_load(CONFIGS[number]))
    assert isinstance(shown, dict)
    base = yaml.safe_load((ROOT / "configs/custom_dit/quickstart.yaml").read_text())
    base["task"]["predictor"]["patch_size"] = [1, 1, 1]
    base["task"]["autoencoder"] = {"type": "pixel", "spatial": 2}
    base.pop("validation", None)
    base["lr_schedule"] = {"type": "constant"}
    train = {"steps": 2, **shown.get("train", {})}
    Path("run.yaml").write_text(yaml.safe_dump(base | {"data": shown["data"], "train": train}))
    (command,) = (block.text for block in PAGE if block.language == "bash")
    assert main(["train", *command.split()[1:]]) == 0
    counted = capsys.readouterr().out.split("padded  dropped\n")[1].split("\n\n")[0].splitlines()
    assert sum(int(line.split()[4]) for line in counted) == 3
    assert len(counted) == 3
