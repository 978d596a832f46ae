"""Ranks are killed under torchrun's `--max-restarts`: the run goes on, and nothing of it is left."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training.verify_resume import compare_runs

HERE = Path(__file__).parent
STEPS = 14


def ranks_below(folder: Path) -> dict[int, int]:
    """Ranks that work in a folder: process id -> the id of its agent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or it is another user's
            if (entry / "cwd").readlink() != folder:
                continue
            if b"\0RANK=" in b"\0" + (entry / "environ").read_bytes():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def steps_of(run: Path) -> int:
    """The last step that a run has logged."""
    with suppress(OSError, ValueError):
        return max((int(row["step"]) for row in read_metrics(run)), default=0)
    return 0


@pytest.fixture
def slow(tiny, tmp_path) -> Path:
    """A run of slow steps that saves every second one."""
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["plugins"] = "local/faulty_task", {"path": [str(HERE / "faulty.py")]}
    config["train"]["steps"], config["checkpoint"] = STEPS, {"every": 2}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def kill_at_random(agents, folder: Path, run: Path, kills: int, drawn: random.Random) -> int:
    """Kills ranks of the agents one after the other, at any moment from their start on.

    Returns:
        The number of ranks killed before the run came near its end.
    """
    done = 0
    while done < kills:
        time.sleep(drawn.uniform(0, 9))
        if steps_of(run) > STEPS - 4 or any(agent.command.process.poll() is not None for agent in agents):
            break
        if pids := sorted(ranks_below(folder)):
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(pids), signal.SIGKILL)
                done += 1
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "each"), [(2, 1), (1, 2)])
def test_a_run_whose_ranks_are_killed_ends_as_one_that_was_left_alone(
    agents, each, slow, mm, start, tmp_path, free_port
):
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    train = ["train", "--config", slow, f"run.dir={tmp_path}"]
    assert mm(*train, "--nproc", 2, "run.name=alone").code == 0
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--rdzv-id", "restarts"]
    command = ["-m", "torch.distributed.run", "--nnodes", agents, "--nproc-per-node", each, *meeting]
    command += ["--max-restarts", 3, "-m", "mm_core.cli.main", *train, "run.name=killed"]
    environment = {"FAULT": "slow", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    running = [start(*command, anew=True, cwd=work, **environment) for _ in range(agents)]
    killed = kill_at_random(
        running, work, tmp_path / "killed", 3, random.Random(os.environ.get("KILL_SEED", "1"))
    )
    ends = [agent.end(200) for agent in running]
    assert [ended.code for ended in ends] == [0] * agents, "\n-----\n".join(ended.err for ended in ends)
    assert killed, "the run ended before the first kill"
    results, remarks = compare_runs(tmp_path / "alone", tmp_path / "killed")
    assert all(result.ok for result in results) and not remarks, (results, remarks)
    assert not ranks_below(work) and not list(temporary.glob("mm_core-*"))
