"""`mm migrate` on folders of MindSpeed-MM, and what `mm validate` says of its files."""

import json
from pathlib import Path

import pytest
from folders import CHATS, CLIPS, ONE_FILE, QWEN, WAN, changed, write, write_one
from mm_mindspeed.testing import examples

from mm_core.cli.main import main
from mm_core.config.load import load_config
from support.conformance import examined

D = "dataset_param.preprocess_parameters."


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_migration_keeps_the_contract_of_migrations():
    examination = examined("mindspeed/mindspeed_mm")
    assert not [f"{o.check}: {o.reason}" for o in examination if o.status == "failed"]
    assert {o.check: o.reason for o in examination if o.status != "passed"} == {}


def test_a_folder_becomes_a_config_that_is_valid_and_planned_with_three_lists(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS, {"tensor-model-parallel-size": 1})
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    for said in (
        "a run of MindSpeed-MM (pretrain)",
        "optimizer.lr",
        "pretrain.sh:8 --lr",
        "dropped, because it does nothing here (1)",
        "no counterpart: training would differ (0)",
        "valid: task core/text_to_video",
        "missing: clips.json (needed to train)",
        "plan of run 't2v_pretrain': 2 ranks",
        "mm-train --config run.yaml --nproc 2",
    ):
        assert said in out, said
    text = Path("run.yaml").read_text()
    assert "  lr: 1.0e-05  # pretrain.sh:8 --lr\n" in text
    assert "caption_dropout: 0.1  # default of the tool for dataset_param.preprocess_parameters.cfg" in text
    assert load_config("run.yaml").run.name == "t2v_pretrain"


def test_a_run_that_would_train_differently_ends_with_1_unless_it_is_accepted(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, changed(CLIPS, {D + "force_resolution": False, D + "drop_short_ratio": 0.0}))
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 1
    out = capsys.readouterr().out
    assert "no counterpart: training would differ (1)" in out
    assert f"data.json:12 {D}force_resolution" in out
    assert main(["migrate", "t2v", "--out", "run.yaml", "--accept"]) == 0


def test_further_scripts_of_a_folder_are_written_beside_the_first(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS)
    script = (tmp_path / "t2v/pretrain.sh").read_text()
    (tmp_path / "t2v/finetune_lora.sh").write_text(
        script.replace("--lr 1e-05", "--lr 3 --lora-r 4 --lora-target-modules proj_q")
    )
    (tmp_path / "t2v/inference.sh").write_text(script.replace("pretrain_x", "inference_sora"))
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 0
    assert load_config("run.yaml").optimizer.options["lr"] == 1e-5
    assert load_config("run_finetune_lora.yaml").train.adapters[0].rank == 4
    assert main(["migrate", "t2v/finetune_lora.sh", "--out", "one.yaml"]) == 0
    assert load_config("one.yaml").optimizer.options["lr"] == 3
    assert "inference" not in capsys.readouterr().out


def test_each_run_of_several_folders_gets_a_file_of_its_own(tmp_path):
    for number in range(4):
        write(tmp_path / f"run{number}", WAN, CLIPS, {"seed": number})
    assert main(["migrate", *(f"run{number}" for number in range(4)), "--out", "run.yaml"]) == 0
    files = sorted(path.name for path in tmp_path.glob("run*.yaml"))
    assert files == ["run.yaml", "run_pretrain.yaml", "run_pretrain_2.yaml", "run_pretrain_3.yaml"]
    assert [load_config(name).run.seed for name in files] == [0, 1, 2, 3]


def test_a_model_that_is_not_there_ends_no_migration(tmp_path, capsys):
    write(tmp_path / "sft", QWEN, CHATS)
    assert main(["migrate", "sft", "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "valid: task core/pretrained" in out and "not planned yet: " in out and "Qwen3-VL" in out


@pytest.mark.parametrize("name", ["model.json", "data.json", "fsdp2.yaml", "run_config.yaml"])
@pytest.mark.parametrize("command", [["validate"], ["train", "--config"], ["validate", "--json"]])
def test_a_file_of_the_tool_is_named_where_a_config_is_expected(name, command, tmp_path, capsys):
    write(tmp_path, WAN, CLIPS)
    write_one(tmp_path, ONE_FILE)
    assert main([*command, name]) == 1
    printed = capsys.readouterr()
    said = (
        json.loads(printed.out)["faults"][0]
        if "--json" in command
        else {"what": printed.err, "hint": printed.err}
    )
    assert "this is a file of MindSpeed-MM" in said["what"]
    assert f"`mm migrate {name} --out run.yaml`" in said["hint"]
    assert main(["migrate", name, "--out", "run.yaml"]) == 0


def test_an_error_in_a_config_of_ours_stays_that_error(tmp_path, capsys):
    Path("mine.yaml").write_text("run: {name: x}\ntask: {type: pretrained}\ntraining: {}\nmodel: {}\n")
    assert main(["validate", "mine.yaml"]) == 1
    assert "MindSpeed" not in capsys.readouterr().err


def test_files_that_no_migration_knows_are_an_error_that_names_the_tools(tmp_path, capsys):
    Path("x.json").write_text("{}")
    assert main(["migrate", "x.json", "--out", "run.yaml"]) == 1
    err = capsys.readouterr().err
    assert "no installed migration recognises these files" in err and "MindSpeed-MM" in err
    assert main(["migrate", "absent", "--out", "run.yaml"]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err
    assert not Path("run.yaml").exists()


def test_a_folder_without_a_training_is_an_error(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS)
    (tmp_path / "t2v/pretrain.sh").unlink()
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 1
    assert "there is no launch script or YAML of a training here" in capsys.readouterr().err


def test_a_value_that_only_a_shell_knows_has_no_counterpart(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS, {"global-batch-size": "$(cat batch)"})
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 1
    out = capsys.readouterr().out
    assert "$(cat batch)" in out and "its value is known only where the script runs" in out


def test_the_files_of_one_run_are_one_run(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS)
    (tmp_path / "t2v/other.sh").write_text((tmp_path / "t2v/pretrain.sh").read_text().replace("1e-05", "3"))
    files = [f"t2v/{name}" for name in ("model.json", "pretrain.sh", "data.json", "fsdp2.yaml")]
    assert main(["migrate", *files, "--out", "run.yaml"]) == 0
    assert [path.name for path in tmp_path.glob("run*.yaml")] == ["run.yaml"]
    assert main(["migrate", *files[:1], *files[2:], "--out", "both.yaml"]) == 0  # of either script
    assert sorted(path.name for path in tmp_path.glob("both*.yaml")) == ["both.yaml", "both_other.yaml"]


@pytest.mark.parametrize(
    ("flags", "words"), [("8 --worker_num 8", "8"), ("4 --worker_num 8", "4 --nnodes 2")]
)
def test_ranks_of_msrun_are_those_of_the_launch(flags, words, tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS, {"global-batch-size": 8})
    script = tmp_path / "t2v/pretrain.sh"
    msrun = (
        f"msrun --local_worker_num {flags} --master_addr a --master_port 60 --bind_core=True pretrain_x.py"
    )
    script.write_text(script.read_text().replace("torchrun --nproc_per_node 2 pretrain_x.py", msrun))
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"mm-train --config run.yaml --nproc {words}" in out and "8 ranks" in out
    assert "--bind_core" in out and "worker_num" in Path("run.yaml").read_text()
    script.write_text(script.read_text().replace("--worker_num 8", "--worker_num $RANKS"))
    assert main(["migrate", "t2v", "--out", "unknown.yaml"]) == 1
    assert "--worker_num  $RANKS  its value is known only where" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "pretrain.sh:3 --mm-model: the file of the model is not there: model.json"),
        ({**QWEN, "model_id": "nobody"}, "model.json:2 model_id: the model 'nobody' has no counterpart here"),
        ({"task": "t2i"}, "pretrain: these files have no model_id"),
    ],
)
def test_a_model_that_is_not_there_or_not_known_is_one_error(model, said, tmp_path, capsys):
    write(tmp_path / "run", model, CHATS)
    if model is None:
        (tmp_path / "run/model.json").unlink()
    assert main(["migrate", "run", "--out", "run.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.count("mm: error") == 1 and said in error and not Path("run.yaml").exists()
    assert model is None or "accepted: wandit, " in error


def test_a_part_of_a_script_that_may_set_flags_is_said_by_its_line(tmp_path, capsys):
    (folder,) = examples(tmp_path)
    script = folder / "pretrain.sh"
    script.write_text("source /usr/local/Ascend/set_env.sh\neval X=1\n" + script.read_text())
    assert main(["migrate", str(script), "--out", "run.yaml"]) == 1
    out = capsys.readouterr().out
    assert "pretrain.sh:2  eval X=1" in out
    assert "  source /usr/local/Ascend/set_env.sh\n  mm-train" in out


def test_a_file_that_a_script_names_and_is_not_there_is_said(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS)
    (tmp_path / "t2v/fsdp2.yaml").unlink()
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 1
    assert "this file is not there, so it was not read" in capsys.readouterr().out


def test_a_file_that_a_user_has_changed_since_is_not_replaced(tmp_path, capsys):
    write(tmp_path / "t2v", WAN, CLIPS)
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 0
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 0
    Path("run.yaml").write_text(Path("run.yaml").read_text() + "# mine\n")
    assert main(["migrate", "t2v", "--out", "run.yaml"]) == 1
    assert "this file exists, and is not replaced" in capsys.readouterr().err
    assert Path("run.yaml").read_text().endswith("# mine\n")
