"""Real commands in real processes: training records the code it has run; stored runs may run only that."""

from __future__ import annotations

import os

import pytest
import yaml

from mm_core.cli.main import main
from support import warm

pytestmark = pytest.mark.slow

PLUGIN = """
from pathlib import Path

from mm_core import Component, hookimpl
from mm_custom_dit.model import CustomDiT

{more}


@hookimpl
def mm_predictors():
    return [Component(name="mine", target="mine:Mine", config="mm_custom_dit.config:CustomDiTConfig")]


@hookimpl
def mm_datasets():
    return [Component(name="rows", target="mine:Rows", config="mm_core.builtin.configs.data:VideoTextConfig")]


from mm_core.data.datasets.video_text import VideoTextDataset


class Mine(CustomDiT):
    pass


class Rows(VideoTextDataset):
    pass
"""


@pytest.fixture
def own(tiny, tmp_path):
    """A YAML with a plugin for the model and for the dataset, which workers of their own read."""
    plugin = tmp_path / "code" / "mine.py"
    plugin.parent.mkdir()
    plugin.write_text(PLUGIN.format(more=""))
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": "mine", "dir": str(tmp_path / "runs")}
    config["task"]["predictor"]["type"] = "local/mine"
    config["data"]["train"]["type"] = "local/rows"
    config["data"]["loader"]["workers"] = 1
    config["train"] |= {"steps": 2, "global_batch_size": 4}
    config["checkpoint"] = {"every": 1}
    config["plugins"] = {"path": [str(plugin)]}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_training_records_and_another_user_is_refused(own, tmp_path, mm, monkeypatch, capsys):
    mine = {"XDG_STATE_HOME": str(tmp_path / "mine")}
    run, plugin = tmp_path / "runs" / "mine", tmp_path / "code" / "mine.py"
    begun = mm("train", "--config", own, "--nproc", 2, "--stop-after", 1, **mine)
    assert begun.code == 75, begun.err
    (entry,) = (tmp_path / "mine/mm_core/trusted_code").iterdir()
    assert entry.read_text() == f"{plugin}\n"
    # The same user goes on, from the YAML in the run's folder too.
    gone_on = mm("train", "--config", run / "config.yaml", **mine)
    assert gone_on.code == 0, gone_on.err
    # Ranks do not import from where the command is typed, which may be a stranger's folder.
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/mm_custom_dit.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    evaluate = ["eval", "--run", str(run), "--split", "train", "--clips", "2"]
    code = "import sys; from mm_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["-P", "-c", code, *evaluate, "--nproc", "2"]  # as the installed `mm` begins
    done = warm.run(command, cwd=tmp_path / "evil", env=os.environ | mine)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert main(evaluate) == 1
    said = capsys.readouterr().err
    assert str(plugin) in said
    assert "--allow-code" in said
    assert main(["validate", str(run / "config.yaml"), "--allow-code"]) == 0
    assert not (tmp_path / "theirs").exists()  # to look at a run is not to train with it


def test_a_home_that_cannot_be_written_is_noted_and_training_goes_on(own, tmp_path, mm):
    (tmp_path / "file").write_text("")
    done = mm("train", "--config", own, XDG_STATE_HOME=str(tmp_path / "file"))
    assert done.code == 0, done.err
    said = done.out + done.err
    assert "this run's code is not recorded as known" in said
    assert "commands on the run will need --allow-code" in said
