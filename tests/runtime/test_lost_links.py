"""Hosts that vanish without a word, because a cable is pulled out or the power fails, and come back."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from mm_core.processes import alive
from mm_core.runtime.launch.restarts import restarts_of
from support import network
from support.disturbed import below, equal, mm_train, pids_of, same_losses, step_of, worlds_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(network.missing() is not None, reason=f"no hosts here: {network.missing()}"),
]

LONG = 400
"""Seconds within which a busy machine notices that a host is gone, 120 s after it is, and starts ranks."""


class Hosts:
    """Two hosts on a switch, with a launcher of one rank each."""

    def __init__(self, start, train, nodes, port, ranked, run) -> None:
        self.start, self.train, self.run, self.launchers = start, train, run, {}
        meeting = ["--nnodes", nodes, "--rdzv-endpoint", f"{network.FIRST}:{port}", "--max-restarts", 9]
        self.words = lambda number: [*meeting, *(["--node-rank", number - 1] if ranked else [])]

    def launch(self, number: int) -> None:
        words = mm_train(*self.train, "--nproc", 1, *self.words(number), f"run.name={self.run.name}")
        become = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        command = [become, *network.on(number), sys.executable, *words]
        self.launchers[number] = self.start("-c", *command, anew=True, OMP_NUM_THREADS="1", FAULT="slow")

    def said(self, number: int, text: str) -> bool:
        return text in self.launchers[number].command.err

    def ranks(self, number: int) -> list[int]:
        return [*filter(alive, below(self.launchers[number].command.pid, pids_of(self.run)))]

    def goes_on(self, steps: int = 1) -> object:
        """Whether that many steps have been taken since this call."""
        before = step_of(self.run)
        return lambda: step_of(self.run) >= before + steps

    def end(self) -> None:
        ends = [each.end(LONG) for each in self.launchers.values()]
        assert [ended.code for ended in ends] == [0, 0], "\n-----\n".join(ended.err for ended in ends)


@pytest.fixture
def hosts(start, free_port, faulty, tmp_path, mm, wait_until):
    """Begins a run of two hosts that has taken three steps, and another one that nothing disturbs."""

    def begin(steps: int, nodes: str = "2", ranked: bool = False) -> Hosts:
        train = faulty(steps)
        assert mm(*train, "--nproc", 2, "run.name=alone").code == 0
        both = Hosts(start, train, nodes, free_port, ranked, tmp_path / "cut")
        for number in (1, 2):
            both.launch(number)
        wait_until(both.goes_on(3), LONG)
        return both

    with network.switch():
        yield begin


def test_a_host_whose_cable_is_pulled_out_is_missed_and_waited_for(hosts, wait_until, tmp_path):
    both = hosts(30)
    network.unplug(2)
    wait_until(lambda: both.said(1, "mm: restart 1 of 9") and both.said(2, "mm: restart 1 of 9"), LONG)
    assert both.said(1, f"host {network.HOSTS[1]} has not responded for 120 s\n")
    assert both.said(2, f"the rendezvous host {network.FIRST}:")
    time.sleep(20)
    assert not both.ranks(1) and not both.ranks(2)
    network.plug(2)
    wait_until(both.goes_on(), LONG)
    both.end()
    (row,) = restarts_of(both.run)
    assert row["hosts"] == network.HOSTS
    equal(tmp_path / "alone", both.run)


def test_a_cable_that_is_out_for_45_seconds_ends_nothing(hosts, wait_until, tmp_path):
    both = hosts(30)
    network.unplug(2)
    time.sleep(45)
    network.plug(2)
    wait_until(both.goes_on(), 120)
    both.end()
    assert not restarts_of(both.run)
    equal(tmp_path / "alone", both.run)


@pytest.mark.parametrize("ranked", [False, True], ids=["found", "ranked"])
def test_the_others_wait_for_a_rendezvous_host_without_power(ranked, hosts, wait_until, tmp_path):
    both = hosts(30, ranked=ranked)
    network.unplug(1)
    for pid in (both.launchers[1].command.pid, *both.ranks(1)):
        os.kill(pid, signal.SIGKILL)
    both.launchers[1].end(60)
    network.power_off(1)
    wait_until(lambda: both.said(2, "mm: restart 1 of 9"), LONG)
    time.sleep(20)
    assert not both.ranks(2) and both.said(2, "mm: waiting for the rendezvous host")
    network.power_on(1)
    network.plug(1)
    both.launch(1)
    wait_until(both.goes_on(), LONG)
    both.end()
    assert len(restarts_of(both.run)) == 1
    equal(tmp_path / "alone", both.run)


def test_one_host_goes_on_while_the_other_is_out_of_reach(hosts, wait_until, tmp_path):
    both = hosts(150, "1:2")
    network.unplug(2)
    wait_until(lambda: both.said(1, "mm: restart 1 of 9"), LONG)
    wait_until(both.goes_on(), LONG)
    network.plug(2)
    wait_until(lambda: both.said(2, "under way without this host"), LONG)
    os.kill(*both.ranks(1), signal.SIGKILL)
    wait_until(lambda: both.said(1, "mm: restart 2 of 9"), LONG)
    both.end()
    assert worlds_of(both.run) == ["2", "1", "2"] and len(restarts_of(both.run)) == 2
    same_losses(tmp_path / "alone", both.run, 150)
