"""Validation in real runs of two ranks: stored runs repeat its figures and clips; signals are handled."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from mm_core.checkpoint.reading import find_checkpoint, open_checkpoint
from mm_core.cli.main import main
from support import warm
from support.logs import log_of

PROMPTS = ["a red circle moves left", "a blue square moves up", "x"]


def config_at(tiny: Path, folder: Path, sampling_steps: int, workers: int = 1) -> Path:
    """The tiny run with held-out data, metrics, an average and samples, in `folder`."""
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": "tiny", "dir": str(folder)}
    config["data"]["validation"] = config["data"]["test"] = config["data"]["train"]
    config["data"]["loader"]["workers"] = workers
    config["ema"] = {"decay": 0.9}
    config["validation"] = {
        "every": 6,
        "rows": 11,
        "metrics": [{"type": "latent_psnr"}, {"type": "frame_change"}],
        "samples": {"prompts": PROMPTS, "steps": sampling_steps, "seed": 3},
    }
    path = folder / "validated.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_a_stored_run_repeats_the_figures_and_the_clips_of_training(tiny, mm, tmp_path):
    trained = mm("train", "--config", config_at(tiny, tmp_path, 4), "--nproc", 2)
    assert trained.code == 0, trained.err
    run = tmp_path / "tiny"
    rows = log_of(run)
    logged = {name: value for row in rows if row["step"] == 12 for name, value in row.items()}
    assert (logged["validation/rows"], logged["test/rows"]) == (11, 64)
    assert 0 < logged["validation_ema/frame_change"] < 1
    for weights, prefix in (("model", "validation"), ("auto", "validation_ema")):
        found = mm("eval", "--run", run, "--weights", weights, "--json")
        assert found.code == 0, found.err
        figures = json.loads(found.out)["metrics"]
        assert {f"{prefix}/{name}" for name in figures} <= logged.keys()
        assert figures == pytest.approx({name: logged[f"{prefix}/{name}"] for name in figures}, rel=1e-5)
    again = tmp_path / "again"
    chosen = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    sampled = mm("sample", "--run", run, "--seed", 3, "--steps", 4, "--out", again, *chosen)
    assert sampled.code == 0, sampled.err
    there = run / "samples/step_00000012"
    assert {path.name for path in again.iterdir()} == {path.name for path in there.iterdir()}
    assert len(list(again.glob("*.mp4"))) == 3
    for path in again.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_while_sampling_saves_and_leaves(tiny, tmp_path, group):
    path = config_at(tiny, tmp_path, 100_000, workers=2)  # sampling would take minutes
    command = ["-m", "mm_core.cli.main", "train", "--config", path, "--nproc", 2]
    running = warm.Running(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, merged=True)
    until = time.monotonic() + 120
    while "validation/loss" not in running.out:  # sampling follows at once
        assert running.process.poll() is None and time.monotonic() < until, running.out
        time.sleep(0.02)
    (os.killpg if group else os.kill)(running.pid, signal.SIGTERM)
    code, text, _ = running.end(120)
    assert code == 75, text
    assert "sampling after step 6 was abandoned because a stop was requested" in text
    run = tmp_path / "tiny"
    assert (run / "checkpoints/step_00000006/checksums.json").exists() and not (run / "samples").exists()


@pytest.mark.slow
def test_figures_that_are_not_finite_are_kept_in_words_and_are_never_the_best(tiny, tmp_path, capsys):
    """JSON has no number for them; and -inf would be the least of all losses."""
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": "tiny", "dir": str(tmp_path)}
    config["data"]["validation"] = config["data"]["train"]
    config["data"]["loader"]["workers"] = 0
    config["plugins"] = {"path": [str(Path(__file__).with_name("odd_metrics.py"))]}
    config["train"]["steps"] = 4
    config["checkpoint"] = {"every": 1, "keep": 9, "best": "figure"}
    figures = ["nan", "0.5", "-inf", "inf"]
    metric = {"type": "local/figures", "figures": figures}
    config["validation"] = {"every": 1, "rows": 2, "metrics": [metric]}
    path = tmp_path / "odd.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(path)]) == 0, capsys.readouterr().err
    run = tmp_path / "tiny"
    steps = sorted((run / "checkpoints").glob("step_*"))
    kept = [open_checkpoint(step).facts["metrics"]["validation/figure"] for step in steps]
    assert kept == ["NaN", 0.5, "-Infinity", "Infinity"]
    assert find_checkpoint(run, "best") == steps[1]
