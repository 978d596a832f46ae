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
    assert "fsdp2.yaml: this is a file of MindSpeed-MM" in said and "2 errors" in said
    assert "fsdp2.yaml:4: engine.align_fsdp_param_groups: engine 'core/fsdp2' has no key" in said
    assert "if it starts no run alone, give all files of the run, or their folder" in said


def test_included_files_of_ours_are_no_others(capsys):
    Path("engine.yaml").write_text(f"type: fsdp2\n{ENGINE}")  # keys that files of another tool have, too
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "engine": {"include": "engine.yaml"}}))
    assert main(["validate", "run.yaml"]) == 0, capsys.readouterr().err
    assert main(["validate", "run.yaml", "train.stepz=1"]) == 1  # the error of another file stays that error
    said = capsys.readouterr().err
    assert "unknown key 'stepz'" in said and "MindSpeed" not in said


@pytest.mark.parametrize("command", [["validate"], ["train", "--config"]])
def test_a_folder_of_another_tool_is_named_with_the_command(command, tmp_path, capsys):
    Path("job").mkdir()
    testing.ai_toolkit(tmp_path / "job")
    assert main([*command, "job"]) == 1
    said = capsys.readouterr().err
    assert "job: this is a folder of ai-toolkit" in said and "`mm migrate job --out run.yaml`" in said


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("x.sh", "\ntorchrun pretrain.py '--a\n", "x.sh:2: this quote is never closed"),
        ("x.json", '{"a": ', "x.json:1: this is not JSON"),
        ("x.toml", "a = ", "x.toml: this is not TOML"),
    ],
)
def test_a_broken_file_that_no_migration_recognises_says_what_is_broken(name, text, what, capsys):
    Path(name).write_text(text)
    assert main(["migrate", name, "--out", "run.yaml"]) == 1
    assert what in capsys.readouterr().err


def test_a_config_is_written_to_a_yaml_alone_and_once_for_each_run(tmp_path, capsys):
    (job,) = testing.ai_toolkit(tmp_path)
    assert main(["migrate", str(job), "--out", "run.json"]) == 1
    assert "--out run.json: a config is a YAML file" in capsys.readouterr().err
    assert main(["migrate", str(job), str(job), "--out", "run.yaml", "--accept"]) == 0
    assert [path.name for path in tmp_path.glob("run*")] == ["run.yaml"]


def test_the_files_of_a_config_without_a_fault_are_read_once(monkeypatch):
    Path("engine.yaml").write_text("type: fsdp2\n")
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "engine": {"include": "engine.yaml"}}))
    read = []
    monkeypatch.setattr(load, "read_file", lambda path, *rest: read.append(path) or read_file(path, *rest))
    assert main(["validate", "run.yaml"]) == 0
    assert sorted(path.name for path in read) == ["engine.yaml", "run.yaml"]


@pytest.mark.parametrize(("name", "alone"), [("data.toml", False), ("train.sh", True), ("style.yaml", True)])
def test_the_hint_for_a_file_is_a_command_that_works_or_says_what_else_to_give(name, alone, tmp_path, capsys):
    testing.ai_toolkit(tmp_path)
    testing.musubi_tuner(tmp_path)
    assert main(["validate", name]) == 1
    hint = " ".join(capsys.readouterr().err.split())
    assert f"`mm migrate {name} --out run.yaml`" in hint and "all files of the run, or their folder" in hint
    assert (main(["migrate", name, "--out", "run.yaml", "--accept"]) == 0) == alone
    assert ("give the script with the flags of the training too" in capsys.readouterr().err) != alone


def test_keys_of_other_tools_in_a_config_of_ours_get_their_names_here(capsys):
    wrong = {"learning_rate": 1e-4, "network_dim": 32, "data_path": "x", "checkpoints": {}}
    train = {"steps": 1, "train_iters": 9, "stepz": 1}
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, **wrong, "train": train}))
    assert main(["validate", "run.yaml"]) == 1
    said = capsys.readouterr().err.splitlines()
    keys = ("learning_rate", "network_dim", "data_path", "train_iters", "stepz", "checkpoints")
    hints = {
        key: said[number + 2]
        for key in keys
        for number, line in enumerate(said)
        if f"unknown key '{key}'" in line
    }
    assert {key: hint.partition("tool is ")[2].partition(" (")[0] for key, hint in hints.items()} == {
        "learning_rate": "optimizer.lr",
        "network_dim": "train.adapters.0.rank",
        "data_path": "data.train.sources.0.annotations",
        "train_iters": "train.steps",
        "stepz": "",
        "checkpoints": "",
    }
    assert "did you mean 'steps'?" in hints["stepz"] and "did you mean 'checkpoint'?" in hints["checkpoints"]
    assert "(musubi-tuner, LLaMA-Factory, Transformers) here" in hints["learning_rate"]
    assert main(["validate", "run.yaml", "optimizer.adam_beta1=0.9"]) == 1
    assert "this key of another tool is optimizer.betas.0" in capsys.readouterr().err
