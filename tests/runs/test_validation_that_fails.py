"""A validation that fails costs no step: what was due to be saved is saved, and the figures follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mm_core.checkpoint.reading import find_checkpoint, open_checkpoint
from mm_core.cli.main import main
from mm_core.telemetry.trackers.local import read_metrics

PLUGIN = Path(__file__).with_name("faulty_metric.py")


def config_of(tiny: Path, folder: Path, validation: dict, **checkpoint: object) -> Path:
    """Four steps, with a validation of two clips after the second and the fourth."""
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": "run", "dir": str(folder)}
    config["data"]["validation"] = config["data"]["train"]
    config["data"]["loader"]["workers"] = 0
    config["plugins"] = {"path": [str(PLUGIN)]}
    config["train"] = {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8}
    config["checkpoint"] = {"every": 2, "keep": 9, **checkpoint}
    config["validation"] = {"every": 2, "rows": 2, **validation}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def faulty(**settings: object) -> dict[str, object]:
    return {"type": "local/faulty", **settings}


def validated(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run) if "validation/loss" in row]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_step_is_saved_and_validated_when_the_run_goes_on(asynchronous, best, tiny, tmp_path, capsys):
    checkpoint = {"async": asynchronous, "best": best}
    config = config_of(tiny, tmp_path, {"metrics": [faulty()]}, **checkpoint)
    assert main(["train", "--config", str(config)]) == 1
    assert "RuntimeError: this metric is broken" in capsys.readouterr().err
    run = tmp_path / "run"
    assert checkpoints(run) == ["step_00000002"] and validated(run) == []
    facts = open_checkpoint(run).facts
    assert facts["evaluated"] is False and facts["metrics"] == {}

    fixed = config_of(tiny, tmp_path, {}, **checkpoint)
    assert main(["train", "--config", str(fixed)]) == 0
    assert checkpoints(run) == ["step_00000002", "step_00000004"] and validated(run) == [2, 4]
    losses = {row["step"]: row["validation/loss"] for row in read_metrics(run) if "validation/loss" in row}
    for step, loss in losses.items():
        facts = open_checkpoint(run / f"checkpoints/step_{step:08d}").facts
        assert facts["evaluated"] is True and facts["metrics"]["validation/loss"] == loss
    if best is not None:
        assert find_checkpoint(run, "best").name == f"step_{min(losses, key=lambda s: losses[s]):08d}"


@pytest.mark.slow
def test_what_was_validated_before_the_samples_failed_is_not_validated_twice(tiny, tmp_path, capsys):
    samples = {"samples": {"prompts": ["up"], "steps": 1}}
    config = config_of(tiny, tmp_path, {**samples, "metrics": [faulty(in_samples=True)]})
    assert main(["train", "--config", str(config)]) == 1
    assert "RuntimeError: this metric is broken" in capsys.readouterr().err
    run = tmp_path / "run"
    assert checkpoints(run) == ["step_00000002"] and validated(run) == [2]
    assert main(["train", "--config", str(config_of(tiny, tmp_path, samples))]) == 0
    assert validated(run) == [2, 4]
    assert {path.name for path in (run / "samples").iterdir()} == {"step_00000002", "step_00000004"}
    (row,) = [row for row in read_metrics(run) if row["step"] == 2 and "validation/loss" in row]
    facts = open_checkpoint(run / "checkpoints/step_00000002").facts
    assert facts["evaluated"] is True and facts["metrics"]["validation/loss"] == row["validation/loss"]


@pytest.mark.slow
def test_saves_between_validations_are_never_the_best(tiny, tmp_path):
    config = config_of(tiny, tmp_path, {}, every=1, keep=1, best="loss", mode="max")
    assert main(["train", "--config", str(config)]) == 0
    run = tmp_path / "run"
    losses = {row["step"]: row["validation/loss"] for row in read_metrics(run) if "validation/loss" in row}
    best = max(losses, key=lambda step: losses[step])
    assert losses.keys() == {2, 4} and find_checkpoint(run, "best").name == f"step_{best:08d}"
    assert set(checkpoints(run)) == {"step_00000002", "step_00000004"}


@pytest.mark.slow
def test_a_fault_of_one_rank_alone_costs_no_step_either(tiny, tmp_path, mm):
    config = config_of(tiny, tmp_path, {"rows": 4, "metrics": [faulty(rank=1)]}, best="loss")
    done = mm("train", "--config", config, "--nproc", 2)
    assert done.code == 1 and "mm: error: rank 1: " in done.err
    assert "faulty_metric.py, line 40, in fail: RuntimeError: this metric is broken" in done.err
    assert checkpoints(tmp_path / "run") == ["step_00000002"]
    assert (tmp_path / "run/checkpoints/LATEST").read_text() == "step_00000002\n"
    files = json.loads((tmp_path / "run/checkpoints/step_00000002/checksums.json").read_text())["files"]
    assert {"__0_0.distcp", "__1_0.distcp"} <= files.keys()
