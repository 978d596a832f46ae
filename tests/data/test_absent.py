"""Data that are not there yet are listed; what is there and wrong is an error in each command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mm_core.builtin import tiny
from mm_core.cli.main import main
from support.tiny_models import ONE_BLOCK

SIZE = {"num_frames": 1, "height": 8, "width": 8}
ROW = {"path": "a.png", "cap": "a caption"}
Document = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the config of a run on this dataset."""

    def write(dataset: Document, **sections: Document) -> Path:
        config: Document = {
            "run": {"name": "one", "dir": str(tmp_path / "runs")},
            "task": ONE_BLOCK,
            "train": {"steps": 1, "micro_batch_size": 1},
            "log": {"trackers": []},
        } | sections
        config["data"] = {"train": dataset, "loader": {"workers": 0}, **sections.get("data", {})}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        return tmp_path / "run.yaml"

    return write


def video_text(folder: Path) -> tuple[Document, Path]:
    """A dataset, and the file of its rows, which is not written."""
    return {"type": "video_text", "annotations": str(folder / "rows.jsonl"), **SIZE}, folder / "rows.jsonl"


def media_text(folder: Path) -> tuple[Document, Path]:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    (folder / "there").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "there/b.png")
    (folder / "there/b.txt").write_text("b")
    sources = [{"annotations": str(folder / name)} for name in ("there", "rows.jsonl")]
    return {"type": "media_text", "sources": sources, **SIZE}, folder / "rows.jsonl"


def text_rows(folder: Path) -> tuple[Document, Path]:
    options = tiny.text_rows(folder)
    Path(str(options["file"])).unlink()
    return {"type": "text_rows", **options}, folder / "rows.jsonl"


def task_of(data: Document, folder: Path) -> dict[str, Document]:
    if data["type"] != "text_rows":
        return {}
    (folder / "model").mkdir(exist_ok=True)
    return {"task": {"type": "pretrained", **tiny.classifier(folder / "model")}}


DATASETS = [video_text, media_text, text_rows]


@pytest.mark.parametrize("dataset", DATASETS)
def test_absent_rows_are_listed_and_only_strict_or_a_start_is_an_error(dataset, run, tmp_path, capsys):
    data, file = dataset(tmp_path)
    config = str(run(data, **task_of(data, tmp_path)))
    line = f"missing: {file} (needed to train)"
    for command in (["validate", config], ["train", "--dry-run", "--config", config]):
        assert main(command) == 0
        assert line in capsys.readouterr().out
        assert main([*command, "--strict"]) == 1
        printed = capsys.readouterr()
        assert line in printed.out and f"1 file that the run needs is missing: {file}" in printed.err
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["missing_files"] == [str(file)]
        assert main([*command, "--json", "--strict"]) == 1
        assert json.loads(capsys.readouterr().out).get("ok") in (None, False)
    assert main(["train", "--config", config]) == 1
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("rows", ["[1", '{"strange": 1}\n'])
def test_rows_that_are_there_and_wrong_are_an_error_in_each_command(dataset, rows, run, tmp_path, capsys):
    data, file = dataset(tmp_path)
    file.write_text(rows)
    config = str(run(data, **task_of(data, tmp_path)))
    for command in (
        ["validate", config],
        ["train", "--dry-run", "--config", config],
        ["train", "--config", config],
    ):
        assert main(command) == 1
        assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_wrong_row_past_the_first_hundred_is_found_by_the_plan(dataset, run, tmp_path, capsys):
    data, file = dataset(tmp_path)
    row = {"text": "a", "label": 0} if dataset is text_rows else ROW
    last = {"text": "a", "label": "strange"} if dataset is text_rows else {"cap": "a"}
    file.write_text("".join(json.dumps(each) + "\n" for each in [row] * 150 + [last]))
    config = str(run(data, **task_of(data, tmp_path)))
    assert main(["validate", config]) == 0
    assert main(["train", "--dry-run", "--config", config]) == 1
    assert "line 151" in capsys.readouterr().err


def test_what_is_there_is_not_listed(run, tmp_path, capsys):
    data, file = media_text(tmp_path)
    file.write_text(json.dumps(ROW))
    for command in (["validate"], ["train", "--dry-run", "--config"]):
        assert main([*command, str(run(data)), "--strict"]) == 0
        assert "missing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "shown"),
    [
        ({"train": {"epochs": 2, "micro_batch_size": 1}}, "steps known once the data are present"),
        ({"data": {"cache": {"dir": "cache"}}}, "data.cache is not looked up while data are missing"),
        ({"data": {"loader": {"mode": "variable", "workers": 0}}}, "1 per micro-batch"),
    ],
)
def test_what_depends_on_absent_rows_is_left_open(sections, shown, run, tmp_path, capsys):
    data, file = media_text(tmp_path)
    if "loader" in sections.get("data", {}):
        data = {"type": "media_text", "sources": data["sources"], "max_height": 8, "max_width": 8}
    assert main(["train", "--dry-run", "--config", str(run(data, **sections))]) == 0
    text = capsys.readouterr().out
    assert f"missing: {file} (needed to train)" in text and shown in text


@pytest.mark.parametrize("name", ["none", "none.tar", "none.parquet", "none/rows.jsonl", "dangling"])
def test_each_kind_of_source_may_be_absent(name, run, tmp_path, capsys):
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    data = {"type": "media_text", "sources": [{"annotations": str(tmp_path / name)}], **SIZE}
    assert main(["validate", str(run(data))]) == 0
    assert f"missing: {tmp_path / name} (needed to train)" in capsys.readouterr().out


def test_absent_folders_are_listed_and_other_things_in_their_place_are_errors(run, tmp_path, capsys):
    data, file = video_text(tmp_path)
    file.write_text(json.dumps(ROW))
    data["folder"] = str(tmp_path / "clips")
    assert main(["validate", str(run(data))]) == 0
    assert f"missing: {tmp_path}/clips (needed to train)" in capsys.readouterr().out
    (tmp_path / "clips").write_text("a file")
    assert main(["validate", str(run(data))]) == 1
    assert "the folder of the videos does not exist" in capsys.readouterr().err
    file.unlink()
    os.mkfifo(file)
    (tmp_path / "clips").unlink()
    assert main(["validate", str(run(data))]) == 1  # it is there, and no file of rows
    assert "named pipe" in capsys.readouterr().err


def test_strict_without_a_plan_is_refused(run, tmp_path, capsys):
    assert main(["train", "--strict", "--config", str(run(video_text(tmp_path)[0]))]) == 1
    assert "--strict works only with --dry-run" in capsys.readouterr().err


def test_a_long_json_list_is_read_by_the_plan_alone(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mm_core.data.rows.json_rows._QUICK", 100)
    data, _ = video_text(tmp_path)
    data["annotations"] = str(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([ROW] * 10 + ["strange"]))
    assert main(["validate", str(run(data))]) == 0
    assert main(["train", "--dry-run", "--config", str(run(data))]) == 1
    assert "row 11" in capsys.readouterr().err


def test_operators_wait_for_the_data(run, tmp_path, capsys):
    data, file = video_text(tmp_path)
    assert main(["train", "--dry-run", "--ops", "--config", str(run(data))]) == 0
    text = capsys.readouterr().out
    assert f"missing: {file}" in text and "the operators are known once the data are present" in text


PLUGIN = """
from dataclasses import dataclass
import torch
from mm_core import Component, hookimpl
from mm_core.plugin import InputPath

@dataclass(frozen=True)
class ManyConfig:
    files: tuple[InputPath, ...]
    named: dict[str, InputPath] | None = None

class Many(torch.utils.data.Dataset):
    def __init__(self, files, named=None):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return {"index": index}

@hookimpl
def mm_datasets():
    return [Component(name="many", target="many:Many", config="many:ManyConfig")]
"""


def test_each_path_of_a_list_and_of_a_mapping_is_looked_for(run, tmp_path, capsys):
    (tmp_path / "many.py").write_text(PLUGIN)
    (tmp_path / "a").touch()
    data = {
        "type": "local/many",
        "files": [f"{tmp_path}/a", f"{tmp_path}/b"],
        "named": {"x": f"{tmp_path}/c", "y": f"{tmp_path}/a"},
    }
    loader = {"mode": "base", "workers": 0}
    config = run(data, plugins={"path": [str(tmp_path / "many.py")]}, data={"loader": loader})
    assert main(["validate", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing_files"] == [f"{tmp_path}/b", f"{tmp_path}/c"]
