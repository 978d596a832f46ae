"""Files of another tool where a config of ours is expected."""

from pathlib import Path

import pytest
import yaml
from mm_trainers import testing

from mm_core.cli.main import main
from mm_core.config import load
from mm_core.config.yaml_nodes import read_file

RUN = {
    "run": {"name": "x"},
    "task": {"type": "pretrained", "from_pretrained": "model", "auto_class": "AutoModelForCausalLM"},
    "data": {"train": {"type": "conversations", "sources": [{"annotations": "chats.jsonl"}]}},
    "train": {"steps": 1},
    "optimizer": {"type": "adamw"},
}
ENGINE = "sharding_size: 2\nparam_dtype: bf16\nreduce_dtype: fp32\n"  # all are keys of ours too


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [["validate"], ["train", "--config"]])
@pytest.mark.parametrize("direct", [True, False])
def test_an_included_file_of_another_tool_is_refused_with_its_name(command, direct, capsys):
    Path("fsdp2.yaml").write_text(f"{ENGINE}align_fsdp_param_groups: true\n")
    Path("base.yaml").write_text("engine: {include: fsdp2.yaml}\n")
    above = {"engine": {"include": "fsdp2.yaml"}} if direct else {"include": "base.yaml"}
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, **above}))
    assert main([*command, "run.yaml"]) == 1
    said = capsys.readouterr().err
    assert "fsdp2.yaml: this is a file of MindSpeed-MM" in said and "align_fsdp" not in said
    assert "it starts no run alone: give `mm migrate` all files of the run, or their folder" in said


def test_included_files_of_ours_are_no_others(capsys):
    Path("engine.yaml").write_text(f"type: fsdp2\n{ENGINE}")  # keys that files of another tool have, too
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "engine": {"include": "engine.yaml"}}))
    assert main(["validate", "run.yaml"]) == 0, capsys.readouterr().err


def test_the_files_of_a_config_without_a_fault_are_read_once(monkeypatch):
    Path("engine.yaml").write_text("type: fsdp2\n")
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "engine": {"include": "engine.yaml"}}))
    read = []
    monkeypatch.setattr(load, "read_file", lambda path, *rest: read.append(path) or read_file(path, *rest))
    assert main(["validate", "run.yaml"]) == 0
    assert sorted(path.name for path in read) == ["engine.yaml", "run.yaml"]


@pytest.mark.parametrize(("name", "alone"), [("data.toml", False), ("train.sh", True), ("style.yaml", True)])
def test_the_hint_for_a_file_is_a_command_that_works(name, alone, tmp_path, capsys):
    testing.ai_toolkit(tmp_path)
    testing.musubi_tuner(tmp_path)
    assert main(["validate", name]) == 1
    hint = " ".join(capsys.readouterr().err.split())
    assert (f"`mm migrate {name} --out run.yaml`" in hint) == alone
    assert ("all files of the run, or their folder" in hint) != alone
    assert (main(["migrate", name, "--out", "run.yaml", "--accept"]) == 0) == alone
