"""Exports leave tables, the files of other hosts, and a past run's environment unchanged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.config.load import load_config
from mm_core.errors import CheckpointError, ConfigError
from mm_core.files import staged_folder
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights

PLUGIN = Path(__file__).with_name("table_parts.py")


def run(tmp_path: Path, **sections: object) -> Path:
    """A checkpoint of a layer with a table, of a run whose data the environment names."""
    clips = {"num_frames": 8, "height": 16, "width": 16}
    document = {
        "run": {"name": "tuned", "dir": str(tmp_path / "runs")},
        "task": {"type": "local/table"},
        "data": {"train": {"type": "video_text", "annotations": "${oc.env:CLIPS}/a.json", **clips}},
        "train": {"steps": 1},
        "plugins": {"path": [str(PLUGIN)]},
        **sections,
    }
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    torch.manual_seed(0)
    given = {
        "net.weight": torch.randn(3, 4),
        "net.bias": torch.randn(3),
        "net.table": 1 / torch.arange(1.0, 6.0),
    }
    save_file(given, tmp_path / "given.safetensors")
    saved, _ = import_weights(load_config(path), tmp_path / "given.safetensors")
    return saved


def test_a_table_keeps_its_precision_whatever_the_weights_are_written_in(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPS", str(tmp_path))
    out = export(run(tmp_path), tmp_path / "out", "safetensors", dtype="bf16")
    (file,) = out.glob("*.safetensors")
    found = {name.removeprefix("net."): tensor for name, tensor in load_file(file).items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        "table": torch.float32,
    }
    assert torch.equal(found["table"], 1 / torch.arange(1.0, 6.0))


def test_an_export_does_not_ask_for_the_environment_of_the_data(tmp_path, monkeypatch):
    """A text stays as written; a missing number is still an error that names what to set."""
    monkeypatch.setenv("CLIPS", str(tmp_path))
    saved = run(tmp_path)
    monkeypatch.delenv("CLIPS")
    assert (export(saved, tmp_path / "out", "safetensors") / "README.md").is_file()
    assert load_config(saved / "config.yaml", spare_environment=True).data.train.options["annotations"] == (
        "${oc.env:CLIPS}/a.json"
    )
    with pytest.raises(ConfigError, match="set CLIPS, or give a default"):
        load_config(saved / "config.yaml")
    text = (saved / "config.yaml").read_text().replace("num_frames: 8", "num_frames: ${oc.env:FRAMES}")
    (tmp_path / "number.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)found '\$\{oc.env:FRAMES\}'.*set FRAMES, or give a default"):
        load_config(tmp_path / "number.yaml", spare_environment=True)


def test_what_freezing_keeps_is_left_out_where_the_config_sets_it(tmp_path, monkeypatch):
    """An export contains it anyway."""
    monkeypatch.setenv("CLIPS", str(tmp_path))
    saved = run(tmp_path, train={"steps": 1, "freeze": ["net.weight"]}, checkpoint={"frozen": False})
    assert OpenedCheckpoint(saved).names("model") == {"net.bias", "net.table"}
    (file,) = export(saved, tmp_path / "out", "safetensors").glob("*.safetensors")
    found, given = load_file(file), load_file(tmp_path / "given.safetensors")
    assert {f"net.{name.removeprefix('net.')}" for name in found} == given.keys()
    assert all(
        torch.equal(tensor, given[f"net.{name.removeprefix('net.')}"]) for name, tensor in found.items()
    )
    (tmp_path / "given.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"contain 1 frozen weight, and their files cannot be used: .*given\.safetensors",
    ):
        export(saved, tmp_path / "again", "safetensors")


def test_what_another_host_writes_is_left_for_a_day(tmp_path):
    """Its processes are unknown here, so the time of the last written file decides."""
    stages = {
        name: tmp_path / f".out.tmp-0{i}-1@{name}" for i, name in enumerate(("writing", "dead", "late"))
    }
    days = 2 * 24 * 3600
    for name, stage in stages.items():
        stage.mkdir()
        (stage / "model.safetensors").touch()
        places = [stage / "model.safetensors", stage] if name == "dead" else [stage] if name == "late" else []
        for place in places:
            os.utime(place, (time.time() - days,) * 2)
    with staged_folder(tmp_path / "out"):
        assert {name for name, stage in stages.items() if stage.exists()} == {"writing", "late"}
