"""Hosts by ssh, for real: two daemons of this machine on two ports, and what is left of a run on them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mm_core.cli.main import main
from mm_core.runtime.launch.restarts import restarts_of
from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training.verify_resume import compare_runs
from support import warm
from support.ranks import free_port
from support.sshd import SSHD, hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None, reason="the program sshd is not installed (package openssh-server)"),
]


@pytest.fixture(scope="module")
def by_ssh(tmp_path_factory) -> Iterator[Path]:
    """A hostfile of two hosts of a slot, and the program `ssh` that reaches them."""
    folder = tmp_path_factory.mktemp("sshd")
    with hosts(folder, 2) as (ports, programs), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        path = folder / "hosts"
        path.write_text("".join(f"127.0.0.1:{port} slots=1\n" for port in ports))
        yield path


@pytest.fixture
def start(by_ssh, tiny, tmp_path, monkeypatch) -> Callable[..., warm.Running]:
    """A run on both hosts, with a folder of its own in the environment that tells its processes apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM_TEST", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def begin(*more: object, hostfile: Path = by_ssh) -> warm.Running:
        command = ["-m", "mm_core.cli.main", "train", "--config", tiny, f"run.dir={tmp_path}", *more]
        meeting = ["--hostfile", hostfile, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        return warm.Running([*command, *meeting], env=dict(os.environ), anew=True, merged=True)

    return begin


def running(folder: Path, word: str = "") -> list[int]:
    """The processes with the folder in their environment, and the word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            belongs = f"MM_TEST={folder}".encode() in (path / "environ").read_bytes()
            if belongs and word.encode() in (path / "cmdline").read_bytes() and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def steps(folder: Path) -> int:
    metrics = folder / "tiny/metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def test_two_hosts_train_the_run_of_two_ranks(start, tiny, tmp_path, mm, capfd):
    code, text, _ = start().end(240)
    assert code == 0, text
    assert "[127.0.0.1:" in text and "done: step 12 of 12" in text
    assert mm("train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path / 'here'}").code == 0
    results, remarks = compare_runs(tmp_path / "tiny", tmp_path / "here/tiny")
    assert results and all(result.ok for result in results) and not remarks, remarks


@pytest.mark.parametrize("victim", ["ssh", "mm_core.cli.main"])
def test_nothing_is_left_on_either_side_when_a_connection_is_killed(start, tmp_path, victim):
    run = start("train.steps=5000", "lr_schedule={type: constant}", "checkpoint.every=5000")
    wait_for(lambda: steps(tmp_path) > 3, 120)
    clients = running(tmp_path, "BatchMode")
    assert len(clients) == 2, "a connection to each host"
    os.kill(run.pid if victim != "ssh" else clients[-1], signal.SIGKILL)
    wait_for(lambda: not running(tmp_path), 30)
    code, text, _ = run.end(10)
    assert code == (69 if victim == "ssh" else -signal.SIGKILL), text
    assert victim != "ssh" or text.count("mm: lost the connection to 127.0.0.1:") == 1
    saved = sorted((tmp_path / "tiny/checkpoints").glob("step_*/checksums.json"))
    assert int(saved[-1].parent.name[5:]) == steps(tmp_path), "the step reached is saved"


def test_a_restart_of_all_hosts_is_recorded_and_resumes_from_the_runs_own_checkpoint(start, tmp_path):
    again = ["--max-restarts", 1, "--resume", "never", "checkpoint.every=2"]
    run = start("train.steps=80", "lr_schedule={type: constant}", *again)
    wait_for(lambda: steps(tmp_path) > 5, 120)
    os.kill(running(tmp_path, "BatchMode")[-1], signal.SIGKILL)
    code, text, _ = run.end(240)
    assert code == 0 and "done: step 80 of 80; 1 restart; run folder" in text, text
    (row,) = restarts_of(tmp_path / "tiny")
    assert row["restart"] == 1 and row["step"] >= 4 and " ended with 69" in row["what"]
    assert len(row["hosts"]) == 2 and f"restart 1: {row['what']}" in text
    found = [each for each in read_metrics(tmp_path / "tiny") if "restarts" in each]
    assert [each["restarts"] for each in found] == [1.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_one_signal_ends_all_hosts_after_a_save(start, tmp_path, number):
    run = start("train.steps=5000", "lr_schedule={type: constant}", "checkpoint.every=5000")
    wait_for(lambda: steps(tmp_path) > 3, 120)
    os.kill(run.pid, number)
    code, text, _ = run.end(60)
    assert code == 75, text
    assert f"stopped by {number.name} after step" in text or "by a signal to another rank after" in text
    assert not running(tmp_path)


def test_a_host_that_refuses_is_a_sentence_and_the_other_ends(start, by_ssh, tmp_path):
    first = by_ssh.read_text().splitlines()[0]
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{first}\n127.0.0.1:{free_port()} slots=1\n")
    code, text, _ = start(hostfile=hostfile).end(90)
    assert code == 1 and text.count("mm: error:") == 1, text
    assert "mm: error: ssh does not reach 127.0.0.1:" in text and "Connection refused" in text
    assert not running(tmp_path)


def test_the_doctor_compares_hosts(by_ssh, capsys):
    code, text = main(["doctor", "--hosts", str(by_ssh)]), capsys.readouterr().out
    assert code == 0 and text.endswith("\nnothing is wrong\n"), text
    labels = [line.split()[0] for line in by_ssh.read_text().splitlines()]
    assert all(re.search(rf"^{label} +mm-core .*, torch 2", text, re.MULTILINE) for label in labels), text
