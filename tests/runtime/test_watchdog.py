"""A hang is distinguished from slowness, and the rank that the others wait for from those that wait."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mm_core.errors import TrainingError
from mm_core.runtime.launch.rank_logs import RankLog
from mm_core.runtime.launch.watchdog import Heartbeat, Watchdog, progress

BEAT = Heartbeat(0, 7, "forward_backward", 40, 0.0, "model.py:1 in forward")


@pytest.mark.parametrize(
    "behind",
    [
        replace(BEAT, step=6, phase="checkpoint", moves=60),
        replace(BEAT, phase="data", moves=60),
        replace(BEAT, moves=39),
        replace(BEAT, waits=False),
    ],
)
def test_the_furthest_behind_is_found_by_step_then_phase_then_moves_then_who_waits(behind):
    assert progress(behind) < progress(replace(BEAT, waits=True))


class Watched:
    """A watchdog of 0.4 seconds whose message is kept instead of ending the process."""

    def __init__(self, run_dir: Path, world: int = 1, limit: float | None = 0.4) -> None:
        self.said: list[TrainingError] = []
        self.log = RankLog(run_dir / "logs/rank_0.log")
        self.dog = Watchdog(run_dir, 0, world, limit, log=self.log, end=self.said.append)

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.said and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        self.dog.close()
        self.log.close()


def test_what_moves_slowly_is_left_alone(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.start()
    for step in range(1, 11):
        watched.dog.step(step)
        watched.dog.enter("data")
        time.sleep(0.15)
    watched.close()
    assert not watched.said and "no progress" not in watched.log.path.read_text()


def test_what_stands_still_is_named_with_its_line_and_leaves_its_stacks(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.start()
    watched.dog.step(3)
    watched.dog.enter("forward_backward")
    line = sys._getframe().f_lineno + 1
    watched.wait(20)
    watched.close()
    (said,) = watched.said
    assert said.where == "step 3, forward backward"
    assert "rank 0 is furthest behind, running forward and backward for step 3, at " in said.what
    assert f"{__file__}:" in said.what and "in wait" in said.what, "the innermost line that is no library's"
    assert said.hint == f"read its stacks in {tmp_path}/logs/rank_0.log; run.stuck_after sets the limit"
    log = watched.log.path.read_text()
    assert "no progress in step 3, forward_backward; the stacks of all threads:" in log
    assert f'"{__file__}", line {line} in test_what_stands_still' in log
    beat = json.loads((tmp_path / "logs/heartbeat_0.json").read_text())
    assert (beat["step"], beat["phase"]) == (3, "forward_backward")


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_is_set_neither_ends_a_run_nor_hides_a_hang(tmp_path, monkeypatch, hours):
    watched, clock = Watched(tmp_path, limit=2.0), time.time
    watched.dog.start()
    watched.dog.enter("data")
    time.sleep(0.6)  # the watch has seen that
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
    watched.wait(1.1)  # by the clock, an hour has gone by, and two looks
    assert not watched.said
    watched.wait(20)
    watched.close()
    assert 2 <= int(watched.said[0].what.split()[3]) < 60, "seconds, and no hour"


def test_a_run_that_moves_on_after_its_stacks_were_left_goes_on(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.start()
    end = time.monotonic() + 20
    while "no progress in" not in watched.log.path.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    assert "no progress in" in watched.log.path.read_text()
    for _ in range(8):
        watched.dog.enter("data")
        time.sleep(0.1)
    watched.close()
    assert not watched.said


def test_the_others_heartbeats_decide_and_torn_ones_do_not(tmp_path):
    watched = Watched(tmp_path, world=4)
    behind = replace(BEAT, rank=2, step=1, place="data.py:5 in read")
    ahead = replace(BEAT, rank=1, step=9)
    for beat in (behind, ahead):
        (tmp_path / f"logs/heartbeat_{beat.rank}.json").write_text(json.dumps(asdict(beat)))
    (tmp_path / "logs/heartbeat_3.json").write_text('{"rank": 3, "st')
    watched.dog.step(5)
    watched.dog.start()
    watched.wait(20)
    watched.close()
    expected = "rank 2 is furthest behind, running forward and backward for step 1, at data.py:5 in read"
    assert expected in watched.said[0].what
    assert "rank_2.log" in str(watched.said[0].hint)


def test_a_heartbeat_names_the_line_of_the_main_thread_without_its_frame_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", None)  # to walk them while the thread runs ended processes
    watched = Watched(tmp_path)
    watched.dog.start()
    time.sleep(0.3)
    watched.close()
    beat = json.loads((tmp_path / "logs/heartbeat_0.json").read_text())
    path, _, rest = beat["place"].rpartition(":")
    assert path == __file__ and rest.endswith("_without_its_frame_objects") and not beat["waits"]


def test_a_heartbeat_of_an_earlier_process_is_replaced_at_once(tmp_path):
    watched = Watched(tmp_path)
    stale = tmp_path / "logs/heartbeat_0.json"
    stale.write_text(json.dumps(asdict(replace(BEAT, step=900))))
    watched.dog.start()
    assert json.loads(stale.read_text())["step"] == 0
    watched.close()


def test_none_watches_nothing(tmp_path):
    before = threading.active_count()
    watched = Watched(tmp_path, limit=None)
    watched.dog.start()
    assert threading.active_count() == before and not list(tmp_path.glob("logs/heartbeat*"))
    watched.close()


def test_a_folder_that_cannot_be_written_does_not_blind_the_watch(tmp_path):
    (tmp_path / "logs").write_text("a file stands there")
    watched = Watched(tmp_path)
    watched.dog.start()
    watched.wait(20)
    watched.close()
    assert "rank 0 is furthest behind" in watched.said[0].what


def test_a_rank_that_is_stopped_is_named_and_nobody_is_sent_to_its_log(tmp_path):
    """It writes neither heartbeats nor stacks; where it stands does not count, for it may have waited too."""
    (tmp_path / "logs").mkdir()
    stopped = replace(BEAT, rank=1, waits=True, moves=60, process="process 4711 on host7")
    file = tmp_path / "logs/heartbeat_1.json"
    file.write_text(json.dumps(asdict(stopped)))
    old = time.time() - 30
    os.utime(file, (old, old))
    watched = Watched(tmp_path, world=2)
    watched.dog.start()
    watched.dog.step(7)
    watched.dog.enter("forward_backward")
    watched.wait(20)
    watched.close()
    (said,) = watched.said
    assert "rank 1 (process 4711 on host7) has not responded for 3" in said.what
    assert said.what.endswith(" s; it was last running forward and backward for step 7")
    assert said.hint == (
        "look at it on its host: `ps -o stat= -p PID` shows T for a stopped process, which `kill -CONT PID` "
        "continues; `py-spy dump --native --pid PID` shows native code that holds Python's lock; if the host "
        "is down, start the run again without it"
    )
