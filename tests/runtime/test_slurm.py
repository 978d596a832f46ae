"""A job of `mm launch slurm` on a cluster of two hosts: warned before its end, and in the queue again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mm_core.training.verify_resume import compare_runs
from support import slurm

HERE = Path(__file__).parent
ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture
def slow(tiny, tmp_path) -> Path:
    """A run that is slow until it is in the queue again, and saves only where it stops and ends."""
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["plugins"] = "local/faulty_task", {"path": [str(HERE / "faulty.py")]}
    config["train"]["steps"], config["checkpoint"] = 40, {"every": 10_000}
    config["data"]["loader"]["workers"] = 1  # Slurm signals each process of a task
    config["run"]["dir"] = str(tmp_path / "runs of two")  # with spaces, as in paths of users
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _seconds(job: dict[str, str]) -> int:
    hours, minutes, seconds = map(int, job["RunTime"].split(":"))
    return 3600 * hours + 60 * minutes + seconds


@pytest.mark.slow
@pytest.mark.skipif(slurm.missing() is not None, reason=f"no cluster here: {slurm.missing()}")
def test_a_job_that_reaches_its_time_limit_waits_in_the_queue_and_ends_as_an_undisturbed_run(
    slow, mm, tmp_path
):
    runs, metrics = tmp_path / "runs of two", tmp_path / "runs of two/Queued/metrics.jsonl"
    assert mm("train", "--config", slow, "--nproc", 2, "run.name=alone").code == 0
    hosts = ["--nodes", 2, "--nproc", 1, "--time", "1:00:00", "--grace", 60, "run.name=Queued"]
    hosts += ["--max-restarts", 3]

    def submit(cluster: slurm.Cluster, *options: object, **more: str) -> str:
        job = mm("launch", "slurm", "--config", slow, *hosts, *options, anew=True, cwd=tmp_path)
        assert job.code == 0, job.err
        (tmp_path / "job.sh").write_text(job.out)
        return cluster.call(
            "sbatch", "--parsable", "job.sh", cwd=tmp_path, OMP_NUM_THREADS="1", **more
        ).strip()

    with slurm.cluster(tmp_path) as cluster:
        with pytest.raises(AssertionError, match="Invalid generic resource"):
            submit(cluster, "--sbatch", "test-only")
        submit(cluster, "--sbatch", "test-only", "--no-gres")
        number = submit(cluster, "--device", "cpu", FAULT="slow at first")
        cluster.wait(number, lambda job: metrics.exists() and job["JobState"] == "RUNNING", 300)
        # From here on it lasts until the warning, which is due two minutes before the limit at the earliest.
        limit = _seconds(cluster.job(number)) // 60 + 2
        cluster.call("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
        cluster.wait(number, lambda job: job["Restarts"] == "1" and job["JobState"] == "PENDING", 300)
        cluster.call("scontrol", "update", f"JobId={number}", "TimeLimit=60")
        ended = cluster.wait(number, lambda job: job["JobState"] in ENDS, 900)
    text = (tmp_path / f"queued-{number}.out").read_text()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", text
    assert "mm: SIGUSR1 received: saving after this step" in text and "stopped by SIGUSR1 after step" in text
    assert f"job {number} waits in the queue again" in text and "done: step 40 of 40" in text
    assert "resource_tracker" not in text
    results, remarks = compare_runs(runs / "alone", runs / "Queued")
    assert all(result.ok for result in results) and not remarks, (results, remarks)
