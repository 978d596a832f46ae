"""SIGTERM in whatever phase: a checkpoint, exit code 75, and a resumed run that is the uninterrupted one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from mm_core.checkpoint.reading import open_checkpoint
from mm_core.cli.main import main
from mm_core.training.verify_resume import compare_runs
from support import warm
from support.logs import log_of

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).with_name("slow_parts.py")


def config_at(tiny: Path, folder: Path, name: str, **slow: object) -> Path:
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": name, "dir": str(folder)}
    config["data"]["validation"] = config["data"]["train"]
    config["data"]["loader"]["workers"] = 2
    config["plugins"] = {"path": [str(PLUGIN)]}
    config["train"]["steps"] = 10
    config["checkpoint"] = {"every": 1000}
    config["validation"] = {
        "every": 6,
        "rows": 32,
        **({"metrics": [slow["metric"]]} if "metric" in slow else {}),
    }
    if "disk" in slow:
        config["callbacks"] = [slow["disk"]]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(config: Path, *flags: object) -> warm.Running:
    command = ["-m", "mm_core.cli.main", "train", "--config", config, "--nproc", 2, *flags]
    return warm.Running(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, merged=True)


def end(running: warm.Running, timeout: float = 150) -> tuple[int, str]:
    code, text, _ = running.end(timeout)
    return code, text


def send(running: warm.Running, group: bool) -> None:
    """To the launcher, or to its process group, as a terminal or a scheduler does."""
    (os.killpg if group else os.kill)(running.pid, signal.SIGTERM)


def wait_for(condition, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def untouched(tiny, tmp_path_factory) -> Path:
    """The run that nobody stops."""
    folder = tmp_path_factory.mktemp("untouched")
    code, text = end(train(config_at(tiny, folder, "run")))
    assert code == 0, text
    return folder / "run"


def resumed_is_untouched(config: Path, run: Path, untouched: Path) -> None:
    code, text = end(train(config))
    assert code == 0, text
    results, remarks = compare_runs(run, untouched)
    assert all(result.ok for result in results) and not remarks, remarks


@pytest.mark.parametrize("group", [False, True])
def test_in_training(group, tiny, tmp_path, untouched):
    config = config_at(tiny, tmp_path, "run")
    process = train(config)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    send(process, group)
    code, text = end(process)
    assert code == 75, text
    step = open_checkpoint(tmp_path / "run").facts["step"]
    assert 2 <= step < 10 and f"stopped by SIGTERM after step {step} of 10" in text
    resumed_is_untouched(config, tmp_path / "run", untouched)


@pytest.mark.parametrize("group", [False, True])
def test_in_validation(group, tiny, tmp_path, untouched):
    metric = {"type": "local/slow_metric", "folder": str(tmp_path), "seconds": 4.0}
    process = train(config_at(tiny, tmp_path, "run", metric=metric))  # 32 seconds without the signal
    wait_for((tmp_path / "evaluating").exists)
    send(process, group)
    sent = time.monotonic()
    code, text = end(process)
    assert time.monotonic() - sent < 20, "the rest of the validation was waited for"
    assert code == 75, text
    assert "validation after step 6 was abandoned because a stop was requested" in text
    assert open_checkpoint(tmp_path / "run").facts["step"] == 6
    resumed_is_untouched(config_at(tiny, tmp_path, "run"), tmp_path / "run", untouched)


@pytest.mark.parametrize("group", [False, True])
def test_when_the_save_takes_40_seconds(group, tiny, tmp_path, untouched):
    """Longer than the 30 seconds after which torch's agent kills ranks that were asked to end."""
    disk = {"type": "local/slow_disk", "folder": str(tmp_path), "seconds": 40.0}
    process = train(config_at(tiny, tmp_path, "run", disk=disk))
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    send(process, group)
    sent = time.monotonic()
    code, text = end(process)
    assert time.monotonic() - sent > 40 and code == 75, text
    resumed_is_untouched(config_at(tiny, tmp_path, "run"), tmp_path / "run", untouched)


def train_here(tiny: Path, folder: Path, at: Sequence[int] = ()) -> int:
    """`mm train` in this process: four steps, validation after the second and the fourth, then the test;
    SIGTERM comes into the evaluations `at`, as counted over all processes."""
    folder.mkdir(exist_ok=True)
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"name": "run", "dir": str(folder)}
    config["data"]["validation"] = config["data"]["test"] = config["data"]["train"]
    config["data"]["loader"]["workers"] = 0
    config["plugins"] = {"path": [str(PLUGIN.with_name("odd_metrics.py"))]}
    config["train"] = {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8}
    config["checkpoint"] = {"every": 1000}
    metric = {"type": "local/signalled", "folder": str(folder), "at": list(at)}
    config["validation"] = {"every": 2, "rows": 8, "metrics": [metric]}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return main(["train", "--config", str(path)])


def figures(run: Path) -> dict[tuple[int, str], float]:
    """What the evaluations have logged, by step and name."""
    rows = log_of(run)
    steps = [row["step"] for row in rows if "lr" in row]
    assert steps == list(range(1, len(steps) + 1)), "no step is taken twice"
    kinds = ("validation/", "test/")
    found = [((row["step"], name), row[name]) for row in rows for name in row if name.startswith(kinds)]
    assert len(found) == len(dict(found)), "nothing is evaluated twice"
    return dict(found)


def saved(run: Path) -> list[tuple[Path, int]]:
    """All but the figures, which join a checkpoint once they are there."""
    paths = (path for path in run.glob("checkpoints/*/*") if path.name != "validation.json")
    return sorted((path, path.stat().st_mtime_ns) for path in paths)


@pytest.fixture(scope="module")
def unsignalled(tiny, tmp_path_factory) -> dict[tuple[int, str], float]:
    folder = tmp_path_factory.mktemp("unsignalled")
    assert train_here(tiny, folder) == 0
    found = figures(folder / "run")
    assert {step for step, name in found if name == "validation/loss"} == {2, 4} and (4, "test/loss") in found
    return found


def test_in_the_last_validation(tiny, tmp_path, capsys, unsignalled):
    """No step is left, but the run is not done: it makes up for the validation and the test."""
    assert train_here(tiny, tmp_path, at=[2]) == 75
    text = capsys.readouterr()
    assert "validation after step 4 was abandoned because a stop was requested" in text.err
    assert "stopped by SIGTERM after step 4 of 4" in text.out
    files = saved(tmp_path / "run")
    assert {step for step, _ in figures(tmp_path / "run")} == {2}
    assert train_here(tiny, tmp_path, at=[2]) == 0
    assert "done: step 4 of 4" in capsys.readouterr().out
    assert figures(tmp_path / "run") == unsignalled
    assert saved(tmp_path / "run") == files, "there is nothing to save again"


def test_in_a_validation_that_is_made_up_for(tiny, tmp_path, capsys, unsignalled):
    """No step is taken before it is there."""
    for _ in range(2):
        assert train_here(tiny, tmp_path, at=[1, 2]) == 75
        assert "stopped by SIGTERM after step 2 of 4" in capsys.readouterr().out
        assert not figures(tmp_path / "run")
    assert train_here(tiny, tmp_path, at=[1, 2]) == 0
    assert figures(tmp_path / "run") == unsignalled


def test_in_the_test(tiny, tmp_path, capsys, unsignalled):
    assert train_here(tiny, tmp_path, at=[3]) == 75
    assert "test after step 4 was abandoned because a stop was requested" in capsys.readouterr().err
    assert train_here(tiny, tmp_path, at=[3]) == 0
    assert figures(tmp_path / "run") == unsignalled
