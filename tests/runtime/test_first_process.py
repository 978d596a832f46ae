"""mm-train as the first process of a container, which gets the container's signals and orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for file in files for each in file.read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root")
@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, 137)])
def test_it_saves_when_the_container_is_stopped_and_ends_when_a_rank_is_killed(
    asked, code, tiny, tmp_path, wait_until
):
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["plugins"] = "local/faulty_task", {"path": [str(HERE / "faulty.py")]}
    config["train"]["steps"], config["data"]["loader"]["workers"] = 500, 1
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(config))
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-P", "-m"]
    command += ["mm_core.cli.main", "train", "--config", "slow.yaml", "--nproc", "2", f"run.dir={tmp_path}"]
    environment = {**os.environ, "FAULT": "slow", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "err").open("w") as err:
        outer = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=err, stderr=err)
    try:
        metrics = tmp_path / "tiny/metrics.jsonl"
        wait_until(lambda: metrics.exists() or outer.poll() is not None, 180)
        (first,) = children(outer.pid)
        ranks = [pid for pid in children(first) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
        assert len(ranks) == 2
        os.kill(first if asked is signal.SIGTERM else ranks[1], asked)
        assert outer.wait(120) == code, (tmp_path / "err").read_text()
    finally:
        outer.kill()
        outer.wait()
    saved = list((tmp_path / "tiny/checkpoints").glob("step_*/checksums.json"))
    assert bool(saved) == (asked is signal.SIGTERM)
