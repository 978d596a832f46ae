"""What follows an attempt, which errors pass, and how launchers meet."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mm_core.errors import ConfigError, DataError, MMError, PeerError, TrainingError
from mm_core.runtime.launch import meeting as meetings
from mm_core.runtime.launch import store as stores
from mm_core.runtime.launch.attempt import Attempt
from mm_core.runtime.launch.launch_folder import FAILED, LaunchFolder
from mm_core.runtime.launch.launch_folder import LOST as LOST_MARK
from mm_core.runtime.launch.meeting import Asked, Meeting, Nodes
from mm_core.runtime.launch.rank_process import passing
from mm_core.runtime.launch.restarts import Decision, End, decide, record, restarts_of

KILLED = End(137, "rank 1 was killed (SIGKILL)", order=1)
LOST = End(69, "lost the connection to another rank", own=False, order=2)


def after(*ends: End | None, before=None, first=None, newest=None, lasted=9.0, most=9) -> Decision:
    named = {f"host{number}": end for number, end in enumerate(ends)}
    return decide(named, before or Decision(True, first=first, step=first), newest, lasted, most)


def test_a_killed_rank_starts_all_hosts_again_whichever_of_them_reports_first():
    for ends in ((KILLED, LOST), (LOST, KILLED)):
        found = after(*ends)
        assert found.again and found.code == 137 and found.what.endswith("rank 1 was killed (SIGKILL)")


@pytest.mark.parametrize("order", [1, 3])
def test_an_error_of_the_input_ends_all_hosts_though_the_others_only_lost_a_connection(order):
    found = after(LOST, End(1, "rank 0: clip 3: nothing can be read here", order=order))
    assert (found.again, found.code) == (False, 1)
    assert found.what == "host1: rank 0: clip 3: nothing can be read here"
    assert found.why == "another try would fail as well"


def test_of_two_errors_the_first_counts():
    assert after(KILLED, End(1, "a bug that a lost rank causes", order=2)).again
    assert not after(End(1, "a bug", order=1), End(137, "killed by its user", order=2)).again


def test_a_host_that_does_not_respond_was_lost_and_a_stop_by_its_ranks_is_none():
    assert after(None, LOST).what == "host0: the host or its launcher was lost"
    assert after(End(75, order=1), None).again, "ranks stop because their launcher was killed"
    assert after(End(75, order=1, asked=True), None).why == "it was asked to stop"
    both = after(End(75, order=1), End(75, order=2))
    assert (both.again, both.code, both.why) == (False, 75, "")


def test_a_run_that_is_done_or_interrupted_is_left_alone():
    assert (after(End(0), End(0)).again, after(End(0), End(0)).code) == (False, 0)
    assert after(End(130, "interrupted", asked=True)).why == "it was asked to stop"


def test_a_run_that_is_complete_on_one_host_is_complete():
    for other in (None, KILLED, LOST):
        found = after(End(0), other)
        assert (found.again, found.code) == (False, 0)
    assert after(End(0), End(1, "a callback failed at the end")).code == 1


def test_two_failures_without_a_new_checkpoint_end_a_run_and_one_between_does_not():
    first = after(KILLED, first=4, newest=4)
    assert first.again and first.in_vain == 1
    second = after(KILLED, before=first, newest=4)
    assert (second.again, second.why) == (False, "2 failures in a row without a new checkpoint")
    assert after(KILLED, before=first, newest=6).in_vain == 0
    assert (first.first, first.number, second.number) == (4, 1, 1)


def test_restarts_are_counted_and_waits_grow_while_attempts_are_short():
    last, waits = None, []
    for step in range(8):
        last = after(KILLED, before=last, newest=step, first=-1, most=8)
        waits.append(last.seconds)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30] and last.number == 8
    assert after(KILLED, before=last, newest=8, lasted=700.0).seconds == 1
    assert after(KILLED, before=last, newest=8, most=8).why == "8 restarts of --max-restarts are used up"


def test_a_restart_is_a_line_of_the_runs_folder(tmp_path):
    record(tmp_path / "run", after(KILLED, newest=3), ["a", "b"], 9.0)
    with (tmp_path / "run/restarts.jsonl").open("a") as file:
        file.write('{"restart": 2, "cut')
    (row,) = restarts_of(tmp_path / "run")
    assert (row["restart"], row["hosts"], row["step"], row["code"]) == (1, ["a", "b"], 3, 137)
    assert restarts_of(tmp_path) == []


def test_hosts_that_cannot_reach_each_other_record_one_restart_and_the_next_launch_its_own(tmp_path):
    record(tmp_path, after(None, LOST), ["a", "b"], 140.0)
    record(tmp_path, after(LOST), ["a", "b"], 140.0)
    assert [row["what"] for row in restarts_of(tmp_path)] == ["host0: the host or its launcher was lost"]
    record(tmp_path, after(LOST), ["a", "b"], 0.0)  # that of another launch is older than this one's attempt
    record(tmp_path, after(LOST, before=after(LOST), newest=4), ["a", "b"], 140.0)
    assert [row["restart"] for row in restarts_of(tmp_path)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("mark", "text", "expected"),
    [
        (
            LOST_MARK,
            "host b has not responded for 120 s",
            End(69, "host b has not responded for 120 s", False),
        ),
        (FAILED, "1 rank 0: no such clip", End(1, "rank 0: no such clip")),
    ],
)
def test_ranks_that_have_ended_are_enough_while_torchs_launcher_waits_for_a_store(
    mark, text, expected, tmp_path, monkeypatch, capfd
):
    """As where the link to the rendezvous host is down: nothing resets the connection."""
    over = threading.Event()
    monkeypatch.setattr(Attempt, "_elastic", lambda self: over.wait(60))
    for limit in ("GRACE", "ENDING"):
        monkeypatch.setattr(f"mm_core.runtime.launch.attempt.{limit}", 0.3)
    rank = subprocess.Popen(["true"])
    (tmp_path / "rank_0.pid").write_text(str(rank.pid))
    folder = LaunchFolder(tmp_path, has_parent=True)
    folder.mark(mark, text)
    attempt = Attempt(Nodes(1, endpoint="node1:29500"), ["true"], folder)
    attempt.started = True
    assert attempt.work() == expected
    assert ("mm: error: " in capfd.readouterr().err) == (mark == LOST_MARK)
    over.set()
    rank.wait()


def flagged() -> MMError:
    fault = DataError("a data worker was killed")
    fault.passing = True
    return fault


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConfigError("a typo"), False),
        (DataError("nothing can be read here"), False),
        (TrainingError("the loss is not finite"), False),
        (PeerError("another rank failed"), False),
        (KeyError("a bug"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (flagged(), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"), True),
        (RuntimeError("HCCL function error: HcclCommInitRootInfo, error code is 6"), True),
        (torch.AcceleratorError("an unspecified launch failure"), True),
        (torch.distributed.DistBackendError("the communicator failed"), True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_of_devices_and_of_communication_pass_and_those_of_config_data_and_code_do_not(error, passes):
    assert passing(error) is passes


class Others(threading.Thread):
    """A launcher in a thread, which meets the others."""

    def __init__(
        self, port: int, nodes: str, facts: dict[str, str] | None = None, last: Decision | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.last = last or Decision(True)
        least, _, most = nodes.partition(":")
        self.meeting = Meeting(
            Nodes(1, int(least), int(most or least), f"127.0.0.1:{port}"), facts or {}, self._asked
        )
        self.joined: object = None
        self.leaves = False
        self.start()

    def _asked(self) -> bool:
        return self.leaves

    def run(self) -> None:
        try:
            self.joined = self.meeting.join(self.last)
        except (Asked, MMError) as fault:
            self.joined = fault


def test_hosts_meet_and_those_that_differ_are_named(free_port):
    hosts = [Others(free_port, "2", {"torch": version}) for version in ("2.13.0", "2.12.1")]
    for host in hosts:
        host.join(30)
    assert all(isinstance(host.joined, MMError) for host in hosts)
    texts = {str(host.joined) for host in hosts}
    assert len(texts) == 1 and "rendezvous: the hosts differ: torch is 2.1" in texts.pop()


def test_a_host_that_waits_names_what_is_missing_and_can_be_stopped(free_port, wait_until):
    alone = Others(free_port, "2")
    wait_until(lambda: "1 more host at 127.0.0.1:" in alone.meeting.waits_for)
    alone.leaves = True
    alone.join(30)
    assert isinstance(alone.joined, Asked)


def test_with_fewer_hosts_a_run_goes_on_and_one_that_comes_late_joins_at_the_restart(
    free_port, monkeypatch, wait_until
):
    monkeypatch.setattr(meetings, "LAST_CALL", 1.0)
    first = Others(free_port, "1:2")
    first.join(30)
    assert isinstance(first.joined, Nodes) and first.joined.most == 1
    late = Others(free_port, "1:2")
    wait_until(lambda: "under way without this host" in late.meeting.waits_for)
    stranger = Others(free_port, "1:2", {"torch": "2.12.1"})
    stranger.join(30)
    assert "torch is absent on the run's hosts, and 2.12.1 on this host" in str(stranger.joined)
    decision, decided = first.meeting.settle(KILLED, lambda ends: Decision(True, 137, number=1, step=4))
    assert decided and decision.step == 4
    first.last = decision
    again = threading.Thread(target=first.run, daemon=True)
    again.start()
    again.join(30)
    late.join(30)
    assert isinstance(late.joined, Nodes) and late.joined == first.joined and late.joined.most == 2
    assert late.meeting.last == first.meeting.last == decision


def test_a_launcher_that_waits_after_a_restart_does_not_name_itself(free_port, wait_until):
    hosts = [Others(free_port, "2") for _ in range(2)]
    for host in hosts:
        host.join(30)
    again = Decision(True, 137, number=1)
    settling = [
        threading.Thread(target=host.meeting.settle, args=(KILLED, lambda ends: again)) for host in hosts
    ]
    for thread in settling:
        thread.start()
    for thread in settling:
        thread.join(30)
    back = threading.Thread(target=hosts[0].run, daemon=True)
    back.start()
    name = socket.gethostname()
    wait_until(lambda: hosts[0].meeting.waits_for == f"{name} at 127.0.0.1:{free_port}; here: {name}")
    hosts[0].leaves = True
    back.join(30)


def test_an_error_of_one_host_reaches_the_others_and_they_decide_the_same(free_port):
    hosts = [Others(free_port, "2") for _ in range(2)]
    for host in hosts:
        host.join(30)
    seen: list[str] = []
    results: dict[int, tuple[Decision, bool]] = {}

    def settle(number: int, end: End) -> None:
        results[number] = hosts[number].meeting.settle(end, lambda ends: after(*ends.values()))

    with hosts[1].meeting.watching(seen.append):
        thread = threading.Thread(target=settle, args=(0, KILLED))
        thread.start()
        end = time.monotonic() + 20
        while not seen and time.monotonic() < end:
            time.sleep(0.1)
    settle(1, LOST)
    thread.join(30)
    assert seen[0].endswith("failed: rank 1 was killed (SIGKILL)")
    assert results[0][0] == results[1][0] and results[0][0].again
    assert sorted([results[0][1], results[1][1]]) == [False, True]


def test_a_host_that_is_silent_while_ranks_run_is_lost(free_port, monkeypatch, wait_until):
    """As one without power: nothing resets its connections."""
    monkeypatch.setattr(meetings, "LOOK", 1)
    monkeypatch.setattr(meetings, "UNSEEN", 2.0)
    hosts = [Others(free_port, "2") for _ in range(2)]
    for host in hosts:
        host.join(30)
    seen: list[str] = []
    with hosts[0].meeting.watching(seen.append):
        with hosts[1].meeting.watching(lambda error: None):
            time.sleep(3)
            assert not seen
        wait_until(lambda: bool(seen))
    assert seen[0].endswith(" has not responded for 2 s") and seen[0].startswith("host ")


def test_a_launcher_that_left_is_not_waited_for_and_what_one_knows_all_take(free_port, wait_until):
    alone = Others(free_port, "2", {"torch": "a typo"})
    wait_until(lambda: "1 more host" in alone.meeting.waits_for)
    alone.leaves = True
    alone.join(30)
    knows = Decision(True, 137, number=3, first=1, step=7)
    hosts = [Others(free_port, "2"), Others(free_port, "2", last=knows)]
    for host in hosts:
        host.join(30)
    assert all(isinstance(host.joined, Nodes) for host in hosts), [host.joined for host in hosts]
    assert [host.meeting.last for host in hosts] == [knows, knows]


def test_two_runs_do_not_meet_at_one_port(free_port, wait_until):
    one = Others(free_port, "2")
    wait_until(lambda: "1 more host" in one.meeting.waits_for)
    other = Meeting(Nodes(1, 2, 2, f"127.0.0.1:{free_port}", "another"), {}, lambda: False)
    with pytest.raises(MMError, match=r"another run \(mm_core\) meets there") as caught:
        other.join(Decision(True))
    assert caught.value.where == f"127.0.0.1:{free_port}"
    one.leaves = True
    one.join(30)


SERVER = """
import sys, time
from mm_core.runtime.launch.store import open_store
store = open_store("127.0.0.1", int(sys.argv[1]), True)
print("serves", flush=True)
time.sleep(600)
"""


def test_a_store_that_does_not_answer_holds_nobody_up(free_port, monkeypatch, wait_until):
    """Torch's own limit does not hold for a server whose process is stopped."""
    monkeypatch.setattr(stores, "ANSWER", 1.0)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(free_port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == "serves\n"
        answers = stores.Answers()
        store = answers.of(lambda: stores.open_store("127.0.0.1", free_port, False))
        assert answers.of(lambda: store.add("key", 1)) == 1
        server.send_signal(signal.SIGSTOP)
        threads = [*Path(f"/proc/{server.pid}/task").glob("*/stat")]
        wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads))
        with pytest.raises(RuntimeError, match="the rendezvous host does not respond"):
            answers.of(lambda: store.add("key", 1))
        assert answers.stuck
        server.send_signal(signal.SIGCONT)
        wait_until(lambda: not answers.stuck)
        assert answers.of(lambda: store.add("key", 1)) == 3, "the call that came late is not lost"
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
