"""mm-train as the first process of a container, which gets the container's signals and orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root")
@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, 137)])
def test_it_saves_when_the_container_is_stopped_and_ends_when_a_rank_is_killed(
    asked, code, tiny, tmp_path, wait_until
):
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-P", "-m"]
    command += ["mm_core.cli.main", "train", "--config", str(tiny), "--nproc", "2", f"run.dir={tmp_path}"]
    command += ["task.type=local/faulty_task", f"plugins.path=[{HERE}/faulty.py]", "train.steps=500"]
    command += ["data.loader.workers=1"]
    environment = {**os.environ, "FAULT": "slow", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "err").open("w") as err:
        outer = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=err, stderr=err)
    try:
        metrics = tmp_path / "tiny/metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, 180)
        (first,) = children(outer.pid)
        ranks = [pid for pid in children(first) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
        assert len(ranks) == 2
        os.kill(first if asked is signal.SIGTERM else ranks[1], asked)
        assert outer.wait(120) == code, (tmp_path / "err").read_text()
    finally:
        outer.kill()
    saved = list((tmp_path / "tiny/checkpoints").glob("step_*/checksums.json"))
    assert bool(saved) == (asked is signal.SIGTERM)
