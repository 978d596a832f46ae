"""Hosts that vanish without a word: their cable is pulled out, or they lose power."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from mm_core.runtime.launch.restarts import restarts_of
from support import network
from support.disturbed import below, equal, mm_train, pids_of, step_of

T0 = time.monotonic()
def say(*w):
    print(f"[{time.monotonic()-T0:6.1f}]", *w, flush=True)


@pytest.fixture
def hosts(start, faulty, free_port, tmp_path, mm, wait_until):
    with network.switch():
        yield lambda *a, **k: Hosts(start, faulty, free_port, tmp_path, mm, wait_until, *a, **k)


class Hosts:
    def __init__(self, start, faulty, port, folder, mm, wait_until, steps, nodes="2", ranked=False, **settings):
        self.start, self.port, self.folder, self.mm, self.wait_until = start, port, folder, mm, wait_until
        self.train = [*faulty(steps, **settings)]
        self.nodes, self.ranked = nodes, ranked
        self.run = folder / "cut"
        self.running = {}

    def alone(self):
        done = self.mm(*self.train, "--nproc", 2, "run.name=alone")
        assert done.code == 0, done.err

    def begin(self, number):
        meeting = ["--nnodes", self.nodes, "--rdzv-endpoint", f"{network.FIRST}:{self.port}", "--rdzv-id", "cut"]
        if self.ranked:
            meeting += ["--node-rank", number - 1]
        words = mm_train(*self.train, "--nproc", 1, *meeting, "--max-restarts", 9, "run.name=cut")
        become = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        self.running[number] = self.start(
            "-c", become, *network.on(number), sys.executable, *words, anew=True, OMP_NUM_THREADS="1", FAULT="slow"
        )
        say("begun", number, self.running[number].command.pid)

    def err(self, number):
        return self.running[number].command.err

    def processes(self, number):
        launcher = self.running[number].command.pid
        return [launcher, *below(launcher, pids_of(self.run))]

    def wait(self, what, condition, seconds=300):
        try:
            self.wait_until(condition, seconds)
        except AssertionError:
            self.dump(); raise
        say(what, "step", step_of(self.run))

    def dump(self):
        for n, r in self.running.items():
            say(f"--- node {n} poll {r.command.process.poll()}\nOUT:", r.command.out[-2500:], "\nERR:", r.command.err[-3000:])

    def ends(self):
        try:
            found = {n: each.end(400) for n, each in self.running.items()}
        except Exception:
            self.dump(); raise
        say("ended", {n: e.code for n, e in found.items()})
        self.dump()
        for row in restarts_of(self.run): say(row)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("pause", [30, 5])
def test_link(hosts, ranked, pause):
    both = hosts(30, ranked=ranked)
    both.alone()
    both.begin(1); both.begin(2)
    both.wait("3 steps", lambda: step_of(both.run) >= 3)
    say(both.processes(1), both.processes(2))
    network.unplug(2); say("cut")
    both.wait("restart on 1", lambda: "mm: restart 1" in both.err(1))
    both.wait("restart on 2", lambda: "mm: restart 1" in both.err(2))
    time.sleep(pause)
    network.plug(2); say("mended")
    n = step_of(both.run)
    both.wait("goes on", lambda: step_of(both.run) > n)
    ends = both.ends()
    assert [e.code for e in ends.values()] == [0, 0]
    equal(both.folder / "alone", both.run)


@pytest.mark.slow
def test_short(hosts):
    both = hosts(30)
    both.alone()
    both.begin(1); both.begin(2)
    both.wait("3 steps", lambda: step_of(both.run) >= 3)
    network.unplug(2); say("cut")
    time.sleep(int(os.environ.get("CUT", "45")))
    network.plug(2); say("mended")
    n = step_of(both.run)
    both.wait("goes on", lambda: step_of(both.run) > n)
    ends = both.ends()
    assert [e.code for e in ends.values()] == [0, 0]
    equal(both.folder / "alone", both.run)


@pytest.mark.slow
@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_power(hosts, ranked, early):
    both = hosts(30, ranked=ranked)
    both.alone()
    both.begin(1); both.begin(2)
    both.wait("3 steps", lambda: step_of(both.run) >= 3)
    network.unplug(1)
    for pid in both.processes(1):
        os.kill(pid, signal.SIGKILL)
    both.running[1].end(30)
    network.power_off(1); say("off")
    if not early:
        both.wait("restart on 2", lambda: "mm: restart 1" in both.err(2))
        time.sleep(10)
    network.power_on(1); network.plug(1); say("on")
    n = step_of(both.run)
    both.begin(1)
    both.wait("restart on 2", lambda: "mm: restart 1" in both.err(2))
    both.wait("goes on", lambda: step_of(both.run) > n)
    ends = both.ends()
    assert [e.code for e in ends.values()] == [0, 0]
    equal(both.folder / "alone", both.run)


@pytest.mark.slow
def test_one_or_two(hosts):
    both = hosts(100, "1:2", every=1)
    both.alone()
    both.begin(1); both.begin(2)
    both.wait("3 steps", lambda: step_of(both.run) >= 3)
    network.unplug(2); say("cut")
    both.wait("restart on 1", lambda: "mm: restart 1" in both.err(1))
    n = step_of(both.run)
    both.wait("goes on", lambda: step_of(both.run) > n + 2)
    network.plug(2); say("mended")
    both.wait("waits", lambda: "under way without this host" in both.err(2))
    os.kill(both.processes(1)[1], signal.SIGKILL); say("killed")
    n = step_of(both.run)
    both.wait("goes on", lambda: step_of(both.run) > n + 2)
    ends = both.ends()
    assert [e.code for e in ends.values()] == [0, 0]
    print((both.run / "logs/rank_0.log").read_text()[:300])
