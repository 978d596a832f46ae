"""The examples of docs/prepare-data.md: each file that it shows, and each config, read to its last sample."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from mm_core.builtin.tiny import write_clip
from mm_core.cli.main import main
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import check_component
from support.pages import ROOT, blocks

PAGE = blocks(ROOT / "docs/prepare-data.md")
CONFIGS = [block.text for block in PAGE if block.language == "yaml"]
SIZE = {"num_frames": 3, "height": 8, "width": 8}
COMMANDS = {
    "mm validate run.yaml": "run.yaml: ok",
    "mm data inspect --config run.yaml --page sheets.html": "data/clips.jsonl  0       1",
    "mm data check --config run.yaml": "0 bad",
}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page shows, with an image and a clip."""
    monkeypatch.chdir(tmp_path)
    for block in PAGE:
        if block.file is not None and block.language in ("text", "json", "csv"):
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
    Image.new("RGB", (32, 24), (9, 99, 200)).save("data/photos/dog.jpg")
    Path("data/clips").mkdir()
    write_clip(Path("data/clips/run.mp4"), torch.zeros(5, 24, 32, 3, dtype=torch.uint8), 8)
    (tar,) = (block.text for block in PAGE if block.text.startswith("tar "))
    subprocess.run(tar.split(), check=True)
    (program,) = (block.text for block in PAGE if block.language == "python")
    Path("program.py").write_text(program)
    pytest.importorskip("pyarrow")
    runpy.run_path("program.py")
    return tmp_path


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_config_reads_what_the_page_shows(shown: Path, number: int) -> None:
    train = yaml.safe_load(CONFIGS[number])["data"]["train"] | SIZE
    data = get_registry().build("dataset", check_component("dataset", train, get_registry(), "data.train"))
    samples = [data[index] for index in range(len(data))]
    assert samples and all(sample["caption"] for sample in samples)
    assert {tuple(sample["pixels"].shape) for sample in samples} <= {(3, 1, 8, 8), (3, 3, 8, 8)}


def test_the_commands_run_on_the_largest_config(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = yaml.safe_load(max(CONFIGS, key=len))
    base = yaml.safe_load((ROOT / "configs/custom_dit/quickstart.yaml").read_text())
    run["data"]["train"] |= SIZE
    Path("run.yaml").write_text(yaml.safe_dump(base | {"data": run["data"]}))
    (commands,) = (block.text for block in PAGE if block.text.startswith("mm "))
    assert commands.splitlines() == [*COMMANDS]
    for command, printed in COMMANDS.items():
        assert main(command.split()[1:]) == 0
        assert printed in capsys.readouterr().out
