"""An exception in a plugin's code is one error message with the author's file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_core.plugin.authors import author_error

BROKEN = """
from mm_core import Component, hookimpl
from mm_core.contracts import PredictorModule
from torch import nn


class Broken(PredictorModule):
    patch_size = (2, 2, 2)

    def __init__(self, in_channels: int = 12, text_dim: int = 32, width: int = 4):
        super().__init__()
        assert width > 2
        self.in_channels, self.text_dim = in_channels, text_dim
        self.line = nn.Linear(width, width)

    def forward(self, latents, timestep, text, text_mask):
        return latents * self.line.weigth


@hookimpl
def mm_predictors():
    return [Component(name="broken", target="broken:Broken")]
"""


@pytest.fixture
def broken(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "broken.py").write_text(BROKEN)
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["plugins"] = {"path": ["broken.py"]}
    config["task"]["predictor"] = {"type": "local/broken"}
    config["run"]["dir"] = str(tmp_path / "runs")
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_an_exception_outside_plugins_is_none() -> None:
    try:
        {}["gone"]
    except KeyError as error:
        assert author_error(error) is None


@pytest.mark.slow
def test_a_dry_run_names_the_line_of_a_constructor(broken: Path, mm: Any) -> None:
    asked = ("train", "--config", broken / "x.yaml", "--dry-run", "task.predictor.width=1")
    done = mm(*asked)
    assert (done.code, done.err) == (
        1,
        f"mm: error: {broken}/broken.py, line 12, in __init__: AssertionError: assert width > 2\n"
        "  hint: correct this line; MM_DEBUG=1 shows the whole traceback\n",
    )
    shown = mm(*asked, MM_DEBUG="1")
    assert shown.err.startswith("Traceback (most recent call last):") and shown.err.endswith(done.err)


@pytest.mark.slow
def test_a_run_names_the_line_and_its_log_has_the_traceback(broken: Path, mm: Any) -> None:
    done = mm("train", "--config", broken / "x.yaml")
    log = broken / "runs/tiny/logs/rank_0.log"
    assert done.code == 1 and "Traceback" not in done.err
    assert done.err.splitlines()[-2:] == [
        f"mm: error: {broken}/broken.py, line 17, in forward: "
        "AttributeError: 'Linear' object has no attribute 'weigth'",
        f"  hint: correct this line; {log} shows the whole traceback",
    ]
    assert "Traceback (most recent call last):" in log.read_text()


TRACKER = """
from mm_core import Component, hookimpl


class Fails:
    def __init__(self, run_dir, early: bool = False):
        if early:
            raise OSError("no server")

    def log(self, step, metrics):
        raise OSError("gone")

    def clips(self, step, clips, folder): ...

    def close(self, ending): ...


@hookimpl
def mm_trackers():
    return [Component(name="fails", target="fails:Fails")]
"""


@pytest.mark.slow
def test_the_warning_of_a_failed_tracker_names_the_author_s_line(tmp_path: Path, tiny: Path, mm: Any) -> None:
    (tmp_path / "fails.py").write_text(TRACKER)
    settings = (
        f"plugins.path=[{tmp_path / 'fails.py'}]",
        "train.steps=2",
        "lr_schedule={type: constant}",
        f"run.dir={tmp_path}",
    )
    for early, said in (("false", "gone"), ("true", "no server")):
        trackers = f"log={{every: 1, trackers: [{{type: local/fails, early: {early}}}]}}"
        done = mm("train", "--config", tiny, *settings, trackers, f"run.name=early_{early}")
        assert done.code == 0
        line = 8 if early == "true" else 11
        assert f"OSError: {said} ({tmp_path / 'fails.py'}, line {line})" in done.err + done.out
