"""Runs whose ranks, launchers and hosts are killed start again, and end as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mm_core.runtime.launch.restarts import restarts_of
from support.disturbed import below, equal, mm_train, pids_of, same_losses, step_of, worlds_of


def saved(run: Path) -> bool:
    """Whether the first checkpoint, which is written in the background, is whole."""
    return (run / "checkpoints/LATEST").exists()


@pytest.mark.slow
def test_a_killed_rank_starts_again_and_the_run_is_the_same(faulty, mm, start, tmp_path, wait_until):
    train = faulty(8)
    assert mm(*train, "--nproc", 2, "run.name=alone").code == 0
    run = tmp_path / "killed"
    running = start(
        *mm_train(*train, "--nproc", 2, "--max-restarts", 3, "run.name=killed"), FAULT="slow at first"
    )
    wait_until(lambda: saved(run), 300)
    os.kill(pids_of(run)[1], signal.SIGKILL)
    ended = running.end()
    assert ended.code == 0, ended.err
    assert "mm: restart 1 of 3 in 1 s, from step 2: rank 1 was killed (SIGKILL)\n" in ended.err
    assert "done: step 8 of 8; 1 restart; run folder" in ended.out
    (row,) = restarts_of(run)
    assert (row["restart"], row["code"], row["step"]) == (1, 137, 2)
    equal(tmp_path / "alone", run)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_always_kills_its_rank_ends_the_run(faulty, start, ranks):
    words = mm_train(*faulty(8, every=1), "--nproc", ranks, "--max-restarts", 9)
    ended = start(*words, FAULT="killed", FAULT_RANK="0").end()
    assert ended.code == 137
    assert "mm: restart 1 of 9 in 1 s, from the beginning: rank 0 was killed" in ended.err
    assert (
        ended.err.rstrip().splitlines()[-1] == "mm: no restart: 2 failures in a row without a new checkpoint"
    )
    assert ended.err.count("mm: restart") == 1


@pytest.mark.slow
def test_an_error_that_would_occur_again_is_not_tried_again(faulty, start):
    ended = start(*mm_train(*faulty(8), "--nproc", 2, "--max-restarts", 9), FAULT="data").end()
    assert ended.code == 1 and "nothing can be read here" in ended.err
    assert ended.err.rstrip().endswith("mm: no restart: another try would fail as well")


class Hosts:
    """Launchers of several hosts, all on this machine."""

    def __init__(self, start, words, port, variables) -> None:
        self.begin = lambda: start(*words(port), anew=True, OMP_NUM_THREADS="1", **variables)
        self.running = []

    def up(self, count: int) -> None:
        """Starts launchers until there are `count`."""
        self.running = [each for each in self.running if each.command.process.poll() is None]
        self.running += [self.begin() for _ in range(count - len(self.running))]


@pytest.fixture
def hosts(start, free_port, faulty, tmp_path):
    def begin(
        steps: int, nodes: str, ranks: int, name: str, fault: str = "slow", **settings: object
    ) -> Hosts:
        train = faulty(steps, **settings)

        def words(port: int) -> list[object]:
            meeting = ["--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarts"]
            return mm_train(*train, "--nproc", ranks, *meeting, "--max-restarts", 99, f"run.name={name}")

        return Hosts(start, words, free_port, {"FAULT": fault})

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "launcher"])
def test_two_hosts_agree_and_go_on(what, hosts, mm, tmp_path, wait_until):
    both = hosts(12, "2", 1, "killed", "slow at first")
    assert (
        mm(
            "train",
            "--config",
            tmp_path / "faulty.yaml",
            f"run.dir={tmp_path}",
            "--nproc",
            2,
            "run.name=alone",
        ).code
        == 0
    )
    run = tmp_path / "killed"
    both.up(2)
    wait_until(lambda: saved(run), 300)
    if what == "rank":
        os.kill(pids_of(run)[1], signal.SIGKILL)
    else:
        both.running[0].send(signal.SIGKILL)
        time.sleep(3)
        both.up(2)
    ends = [each.end(400) for each in both.running]
    assert [ended.code for ended in ends] == [0, 0], "\n-----\n".join(ended.err for ended in ends)
    if what == "rank":
        assert all("mm: restart 1 of 99 in 1 s, from step 2: " in ended.err for ended in ends)
        assert len(restarts_of(run)) == 1
    equal(tmp_path / "alone", run)


def disturb(what: str, both: Hosts, run: Path, drawn: random.Random) -> None:
    """Kills or stops something of the run, and starts again what nothing else starts."""
    victim = drawn.choice(both.running)
    launcher = victim.command.process.pid
    ranks = below(launcher, pids_of(run))
    if what in ("kill rank", "stop rank") and ranks:
        os.kill(drawn.choice(ranks), signal.SIGKILL if what == "kill rank" else signal.SIGSTOP)
    elif what == "stop launcher":
        victim.send(signal.SIGSTOP)
        time.sleep(drawn.uniform(1, 8))
        victim.send(signal.SIGCONT)
    else:
        for pid in (launcher, *(ranks if what == "kill host" else [])):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(drawn.uniform(0, 5))
        both.up(2)


@pytest.mark.slow
def test_twenty_kills_and_stops_leave_no_trace(hosts, mm, tmp_path, wait_until):
    """KILLS and KILL_SEED in the environment set their number and their draws."""
    kills, drawn = int(os.environ.get("KILLS", "20")), random.Random(os.environ.get("KILL_SEED", "1"))
    both = hosts(6 * kills + 4, "2", 2, "killed", every=1, stuck_after=20.0)
    train = ["train", "--config", tmp_path / "faulty.yaml", f"run.dir={tmp_path}", "--nproc", 4]
    assert mm(*train, "run.name=alone").code == 0
    run, done = tmp_path / "killed", 0
    both.up(2)
    for number in range(kills):
        what = ("kill rank", "kill launcher", "stop rank", "kill host", "stop launcher")[number % 5]
        before = step_of(run)
        wait_until(lambda: step_of(run) > before + 1, 400)  # noqa: B023 - within this turn
        if step_of(run) >= 6 * kills:
            break
        time.sleep(drawn.uniform(0, 1))
        disturb(what, both, run, drawn)
        done += 1
    ends = [each.end(600) for each in both.running]
    assert [ended.code for ended in ends] == [0, 0], "\n-----\n".join(ended.err for ended in ends)
    assert done == kills, f"the run ended after {done} of {kills} disturbances"
    equal(tmp_path / "alone", run)


@pytest.mark.slow
def test_a_host_that_is_lost_is_missed_and_one_that_comes_back_takes_part(hosts, mm, tmp_path, wait_until):
    both = hosts(40, "1:2", 1, "changing", every=1)
    train = ["train", "--config", tmp_path / "faulty.yaml", f"run.dir={tmp_path}", "--nproc", 2]
    assert mm(*train, "run.name=alone").code == 0
    run = tmp_path / "changing"
    both.up(2)
    wait_until(lambda: step_of(run) >= 3, 300)
    second = next(each for each in both.running if below(each.command.process.pid, pids_of(run)[1:]))
    for pid in (second.command.process.pid, *below(second.command.process.pid, pids_of(run))):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(restarts_of(run)) == 1 and step_of(run) >= 6, 300)
    assert worlds_of(run) == ["2", "1"]
    both.up(2)
    wait_until(lambda: "under way without this host" in both.running[-1].command.err, 300)
    os.kill(pids_of(run)[0], signal.SIGKILL)
    ends = [each.end(600) for each in both.running]
    assert [ended.code for ended in ends] == [0, 0], "\n-----\n".join(ended.err for ended in ends)
    assert worlds_of(run) == ["2", "1", "2"]
    same_losses(tmp_path / "alone", run, 40)


def test_hosts_that_may_be_missing_need_a_step_of_one_size(tiny, mm):
    words = ["train", "--config", tiny, "--nproc", 2, "--nnodes", "1:3", "--rdzv-endpoint", "127.0.0.1:29999"]
    refused = mm(*words, "train.global_batch_size=null")
    assert refused.code == 1 and "train.global_batch_size" in refused.err and "mm: waiting" not in refused.err
    refused = mm(*words, "train.global_batch_size=8", "train.micro_batch_size=1")
    assert refused.code == 1 and "on 3 hosts: train.global_batch_size" in refused.err
    assert "6, 12" in refused.err
