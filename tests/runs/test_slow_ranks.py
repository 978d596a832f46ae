"""One of two ranks sleeps 30 ms in each step: the times of the steps are equal, and it is named. On a busy
machine no other one is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from mm_core.report.reading import read_run

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parents[1] / "runtime/faulty.py"

WORK = """
import hashlib, os, random, time
drawn = random.Random({seed})
while os.getppid() == {parent}:
    until = time.monotonic() + drawn.expovariate(1)
    while time.monotonic() < until:
        hashlib.sha256(os.urandom(2**20))
    time.sleep(drawn.expovariate(1))
"""


@pytest.fixture
def trained(tiny, tmp_path, mm) -> Callable[..., tuple[list[dict[str, object]], str]]:
    """Trains on two ranks; returns the notes of slow ranks, and the command's output."""
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["data"]["train"]["type"] = "local/faulty_task", "local/faulty_data"
    config["plugins"] = {"path": [str(PLUGIN)]}
    config["train"] |= {"global_batch_size": 4}  # a rank takes two samples a step
    config["checkpoint"], config["lr_schedule"] = {"every": 1000}, {"type": "constant"}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(config))

    def train(steps: int, fault: str, name: str = "tiny") -> tuple[list[dict[str, object]], str]:
        words = [f"run.dir={tmp_path}", f"run.name={name}", f"train.steps={steps}"]
        done = mm("train", "--config", path, "--nproc", 2, *words, FAULT=fault, timeout=400)
        assert done.code == 0, done.err
        notes = tmp_path / name / "slow_ranks.jsonl"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [json.loads(line) for line in lines], done.out + done.err

    return train


@pytest.fixture
def busy() -> Iterator[None]:
    """Other processes work and rest by turns, as those of a test suite: three, for two cores."""
    works = [WORK.format(seed=seed, parent=os.getpid()) for seed in range(3)]
    others = [subprocess.Popen([sys.executable, "-c", work]) for work in works]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.parametrize("fault", ["slow forward", "slow data"])
def test_the_rank_that_the_other_waits_for_is_named_within_60_steps(trained, tmp_path, fault):
    (row,), output = trained(60, fault)
    assert row["step"] <= 60 and row["rank"] == 1
    (remark,) = read_run(tmp_path / "tiny", "tiny").remarks
    assert remark in output and remark.startswith("step 50: rank 1 (")
    assert ", cpu) is slow: 0." in remark and remark.endswith("; all ranks wait for it")


def test_a_slow_rank_is_named_on_a_busy_machine_and_no_other_is(trained, busy):
    """Twenty runs without a slow rank, and three with one."""
    notes = {number: trained(100, "", f"equal-{number}")[0] for number in range(20)}
    assert not any(notes.values()), notes
    for number, fault in enumerate(("slow forward", "slow data", "slow forward")):
        (row,), _ = trained(60, fault, f"slow-{number}")
        assert (row["rank"], row["step"]) == (1, 50)
