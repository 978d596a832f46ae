"""Signals: ranks save and end, a second Ctrl-C leaves at once, nobody outlives the launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mm_core.runtime.launch.signals import STOPPED, StopFlag, leaving_at_signals

HERE = Path(__file__).parent
SCRIPT = HERE / "ranks_that.py"


@pytest.fixture
def stoppable(start, tmp_path, wait_until, request):
    """Two ranks that go on until they are asked to stop."""
    running = start(SCRIPT, "launch", "stop", anew=getattr(request, "param", False))
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists())
    return running


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_every_rank_saves_and_the_exit_code_shows_it(stoppable, number):
    stoppable.send(number)
    ended = stoppable.end()
    assert ended.code == STOPPED
    for rank in (0, 1):
        assert f"rank {rank} saved after {number.name}\n" in ended.out
    assert ended.err.count("saving after this step, then stopping") == 1 and "error" not in ended.err


@pytest.mark.slow
def test_the_echo_of_ctrl_c_is_not_a_second_one(stoppable):
    stoppable.send(signal.SIGINT)
    time.sleep(0.2)
    stoppable.send(signal.SIGINT)
    ended = stoppable.end()
    assert ended.code == STOPPED and ended.out.count("saved after SIGINT") == 2
    assert "press Ctrl-C again to stop at once" in ended.err


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(stoppable):
    stoppable.send(signal.SIGINT)
    time.sleep(1.1)
    stoppable.send(signal.SIGINT)
    ended = stoppable.end()
    assert ended.code == 130 and "saved" not in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("stoppable", [True], indirect=True, ids=["anew"])
def test_ranks_do_not_outlive_a_launcher_that_was_killed(stoppable):
    stoppable.send(signal.SIGKILL)
    ended = stoppable.end()  # the ranks hold its output open until they end
    assert ended.code == -signal.SIGKILL
    assert ended.out.count("saved after the loss of its launcher") == 2


@pytest.mark.slow
def test_a_second_ctrl_c_while_another_host_has_not_ended_is_no_stop_before_a_restart(
    start, tmp_path, free_port, wait_until
):
    hosts = [start(SCRIPT, "launch", "stop", f"127.0.0.1:{free_port}") for _ in range(2)]
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists())
    hosts[0].send(signal.SIGINT)
    time.sleep(1.2)
    hosts[0].send(signal.SIGINT)
    ended = hosts[0].end()
    assert ended.code == 130 and "restart" not in ended.err
    hosts[1].send(signal.SIGTERM)
    hosts[1].end()


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_hosts_can_be_stopped(start, free_port, wait_until):
    waiting = start(SCRIPT, "launch", "fine", f"127.0.0.1:{free_port}")
    wait_until(lambda: waiting.command.err.endswith("\n"))
    assert re.fullmatch(
        rf"mm: waiting for 1 more host at 127.0.0.1:{free_port}; here: \S+ \(up to 15 minutes\)\n",
        waiting.command.err,
    )
    waiting.send(signal.SIGTERM)
    ended = waiting.end()
    assert ended.code == 128 + signal.SIGTERM and not ended.pids
    assert ended.err.endswith("mm: stopped before any rank had started\n")


@pytest.mark.slow
def test_ranks_share_the_cores(launch):
    cores = len(os.sched_getaffinity(0))
    assert launch("fine", OMP_NUM_THREADS="7").out.count("threads 7\n") == 2
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, SCRIPT, "launch", "fine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count(f"threads {max(1, cores // 2)}\n") == 2


def test_the_flag_notes_the_first_signal_and_handlers_return():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with StopFlag() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGUSR1"
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_while_a_rank_waits_is_quiet(capfd, monkeypatch):
    """The pipe for its messages had no reader any more: a traceback of BrokenPipeError on stderr."""
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with StopFlag() as stop:
        with leaving_at_signals("waits", patience=10.0):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
                time.sleep(0.05)
        assert stop.requested == "SIGTERM"
    assert raised == [] and capfd.readouterr().err == ""


WAITING = """
import time
from mm_core.runtime.launch.signals import StopFlag, leaving_at_signals
with StopFlag(), leaving_at_signals("waiting for the other ranks to connect", patience=0.0):
    print("waits", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_rank_that_waits_ends_at_a_signal_where_nobody_reads_its_output_any_more():
    """As ranks do whose agent and terminal were killed: they were left waiting for ever."""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert process.stdout is not None and process.stdout.readline() == b"waits\n"
    os.close(reader)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(20) == STOPPED
    finally:
        process.kill()
        process.stdout.close()


def test_outside_of_the_main_thread_nothing_is_touched():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopFlag() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_a_lone_process(start, tmp_path, wait_until):
    script = tmp_path / "alone.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom mm_core.runtime.launch.signals import StopFlag\n"
        "with StopFlag(announce=True) as stop:\n    Path('ready').touch()\n    time.sleep(60)\n"
    )
    running = start(script)
    wait_until((tmp_path / "ready").exists)
    running.send(signal.SIGINT)
    time.sleep(1.1)
    running.send(signal.SIGINT)
    ended = running.end()
    assert ended.code == 130
    assert ended.err == (
        "mm: SIGINT received: saving after this step, then stopping;"
        " press Ctrl-C again to stop at once, without saving\n"
    )
