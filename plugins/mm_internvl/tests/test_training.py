"""Runs over `internvl/conversations`: a config alone trains a tiny InternVL, packed or grouped by length."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from mm_internvl.testing import make_tiny_checkpoint

import mm_core
from mm_core.errors import ConfigError
from support import conversation_rows as data
from support import warm


@pytest.fixture
def config(tmp_path):
    """The page's config, on a tiny checkpoint."""
    page = (Path(__file__).parents[3] / "docs" / "internvl.md").read_text(encoding="utf-8")
    written = yaml.safe_load(re.search(r"```yaml\n(run: .*?)```", page, re.S)[1])
    make_tiny_checkpoint(tmp_path / "model")
    data.draw(tmp_path / "files")
    rows = [*data.ROWS, *(data.asked(f"what is {n}?", "number " * (n % 5 + 1)) for n in range(10))]
    data.write(tmp_path / "files" / "rows.jsonl", rows)
    written["run"]["dir"] = str(tmp_path / "runs")
    written["task"]["from_pretrained"] = str(tmp_path / "model")
    source = {"annotations": str(tmp_path / "files" / "rows.jsonl")}
    written["data"]["train"].update(
        processor=str(tmp_path / "model"), sources=[source], max_length=200, max_tiles=2
    )
    written["optimizer"]["lr"] = 1e-2
    written["engine"] = {"type": "fsdp2"}
    written["train"] = {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["data.loader.workers=1"],
        [
            *("data.train.packing=false", "data.loader.group_by_length=true"),
            *("data.loader.workers=0", "train.micro_batch_size=2"),
        ],
    ],
    ids=["packed", "grouped"],
)
def test_the_config_of_the_page_trains(config, options):
    mm_core.train(mm_core.load_config(config, options))
    (file,) = config.parent.glob("runs/*/metrics.jsonl")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    assert logged[-1]["loss"] < 0.8 * logged[0]["loss"]
    assert not (file.parent / "skipped.jsonl").exists()
    manifest = json.loads((file.parent / "manifest.json").read_text())
    assert "sources.0.annotations" in manifest["data"]["train"]["files"]


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_image_compute_what_one_computes(config):
    """Text alone and several images by turns: in every step one rank has nothing for the vision tower."""
    words, pictures, video = data.ROWS[0], data.ROWS[2], data.ROWS[3]
    data.write(config.parent / "files" / "rows.jsonl", [words, pictures, words, data.ROWS[1], words, video])
    options = ["data.train.packing=false", "data.loader.sampler=sequential", "data.loader.workers=0"]
    options += ["data.loader.drop_last=true", "train.steps=3", "optimizer.lr=1e-3"]
    mm_core.train(mm_core.load_config(config, [*options, "run.name=alone"]))
    command = ["train", "--config", config, "--nproc", 2, *options, "run.name=two"]
    done = warm.mm(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    alone, two = (_logged(config.parent / "runs" / name) for name in ("alone", "two"))
    assert len(alone) == len(two) == 3
    for one, other in zip(alone, two, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def _logged(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_config_is_checked_without_torch_and_its_fault_is_one_error(config):
    with pytest.raises(ConfigError) as fault:
        mm_core.load_config(config, ["data.train.max_tile=3", "data.train.min_tiles=9"])
    sentences = [str(found) for found in fault.value.faults]
    assert any("max_tile" in sentence and "max_tiles" in sentence for sentence in sentences)
