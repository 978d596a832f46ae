"""How a run ended is what its trackers receive, wherever it ended."""

from __future__ import annotations

import pytest

from mm_core.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BROKEN = """
from mm_core import Component, hookimpl
from mm_core.contracts import Callback

class BrokenEnd(Callback):
    def run_ended(self, step, error):
        raise OSError("the last word cannot be written")

class BrokenStep(Callback):
    def step_ended(self, step, metrics):
        raise KeyError("a bug")

@hookimpl
def mm_callbacks():
    return [Component(name=f"broken_{n}", target=f"broken:Broken{n.title()}") for n in ("end", "step")]
"""


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        ([], 0, "FINISHED"),
        (["--stop-after", "1"], 75, "KILLED"),
        (["callbacks=[{type: local/broken_step}]"], 1, "FAILED"),
        (["callbacks=[{type: local/broken_end}]"], 1, "FAILED"),  # when all steps are done
    ],
)
def test_mlflow_shows_how_a_run_ended(arguments, code, status, tiny, tmp_path, monkeypatch, capsys):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN)
    store = f"file:{tmp_path / 'mlflow'}"
    common = [f"run.dir={tmp_path}", "train.steps=2", "lr_schedule={type: constant}", "data.loader.workers=0"]
    common.append(f"plugins.path=[{plugin}]")
    tracker = f"log.trackers=[{{type: mlflow, tracking_uri: '{store}'}}]"
    assert main(["train", "--config", str(tiny), *common, tracker, *arguments]) == code, capsys.readouterr()
    kept = (tmp_path / "tiny/mlflow_run_id.txt").read_text().strip()
    assert mlflow.MlflowClient(tracking_uri=store).get_run(kept).info.status == status
