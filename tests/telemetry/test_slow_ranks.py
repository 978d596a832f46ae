"""Ranks that the others wait for: own time leaves collectives out, and only what lasts is noted."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mm_core.device.torch_private import collectives_within
from mm_core.processes import CoreWaits
from mm_core.report.reading import slow_ranks
from mm_core.telemetry.phase_clock import STEPS, PhaseClock
from mm_core.telemetry.slow_ranks import FILE, SlowRanks, slowness


class Moments:
    """A clock that the test moves."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def passed(self, moment: float) -> bool:
        return True

    def seconds(self, begun: float, ended: float) -> float:
        return ended - begun


class Step:
    """Steps on a clock, of which the ranks wait in `waits` seconds."""

    def __init__(self) -> None:
        self.clock = Moments()
        self.phases = PhaseClock(self.clock)

    def take(self, data: float = 1.0, compute: float = 4.0, waits: Sequence[float] = (2.0,)) -> None:
        for phase, seconds in (("data", data), ("wait", 8.0), ("encode", 0.5), ("forward_backward", compute)):
            self.phases.enter(phase)
            self.clock.now += seconds
        for seconds in waits:
            assert self.phases.wait(lambda seconds=seconds: self._pass(seconds)) == "gathered"
        for phase, seconds in (("optimizer", 0.25), ("log", 16.0)):
            self.phases.enter(phase)
            self.clock.now += seconds

    def _pass(self, seconds: float) -> str:
        self.clock.now += seconds
        return "gathered"

    def own(self) -> float:
        self.phases.enter("data")  # a step is known when the next one begins
        self.phases.take()
        return self.phases.own()


def test_own_time_is_a_steps_without_collectives_and_what_one_rank_does():
    steps = Step()
    for _ in range(3):
        steps.take()
        steps.phases.take()
    assert steps.own() == 1.0 + 0.5 + 4.0 + 0.25


def test_phases_last_as_long_with_their_collectives():
    steps = Step()
    steps.take()
    spent = {"data": 1.0, "wait": 8.0, "encode": 0.5, "forward_backward": 6.0, "optimizer": 0.25, "log": 16.0}
    assert steps.phases.take() == spent


def test_without_collectives_nothing_is_known():
    steps = Step()
    steps.take(waits=())
    assert steps.own() == 0.0


def test_a_tenth_of_the_steps_may_stall_and_old_ones_are_forgotten():
    steps = Step()
    for _ in range(STEPS):
        steps.take(compute=100.0)
    for step in range(STEPS):
        steps.take(data={3: 50.0, 15: 70.0, 7: 0.5}.get(step, 1.0))
    assert steps.own() == 5.75


def test_a_rank_that_waits_for_its_data_in_every_fourth_step_is_not_forgotten():
    steps = Step()
    for step in range(STEPS):
        steps.take(data=1.0 if step % 4 else 9.0)
    assert steps.own() > 1.2 * 5.75


def test_time_without_a_core_is_not_a_ranks_own():
    waits: list[tuple[float, float]] = []
    ranks = [threading.Thread(target=_spin, args=(waits, 0.3)) for _ in range(3)]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # threads inherit it
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    finally:
        os.sched_setaffinity(0, before)
    assert len(waits) == 3 and all(0 < waited < lasted for waited, lasted in waits)


def _spin(waits: list[tuple[float, float]], seconds: float) -> None:
    """Computes without the interpreter's lock, with other threads on the same core."""
    coreless, began = CoreWaits(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        hashlib.sha256(bytes(2**20))
    waits.append((coreless(), time.perf_counter() - began))


def test_an_error_in_a_collective_passes_through_and_ends_the_wait():
    steps = Step()
    for phase in ("data", "forward_backward"):
        steps.phases.enter(phase)

    def lost() -> None:
        steps.clock.now += 2.0
        raise ConnectionError

    with pytest.raises(ConnectionError):
        steps.phases.wait(lost)
    steps.clock.now += 3.0
    steps.phases.enter("log")
    assert steps.own() == 3.0


def test_the_others_median_is_the_measure():
    assert slowness([1.0, 1.3, 1.0, 1.1]) == pytest.approx({0: 1 / 1.1, 1: 1.3, 2: 1 / 1.1, 3: 1.1})
    assert slowness([1.0]) == slowness([1.0, 0.0]) == slowness([]) == {}


class OnHosts:
    """Ranks on hosts of their own, as the first one sees them."""

    rank, gathers = 0, 0

    def gather(self, item: Any) -> list[Any]:
        self.gathers += 1
        return [f"host-{rank}, cuda:{rank}" for rank in range(4)]


@pytest.fixture
def slow(tmp_path: Path) -> SlowRanks:
    """Of a run that begins at step 1,000, with its notes."""
    notes: list[str] = []
    found = SlowRanks(OnHosts(), tmp_path, 1000, notes.append)
    found.notes = notes
    return found


def judge(slow: SlowRanks, steps: range, own: float) -> None:
    for step in steps:
        slow.judge(step, [1.0, 1.0, own, 1.0])


def test_a_slow_rank_is_noted_once_until_it_recovers(slow, tmp_path):
    judge(slow, range(1001, 1151), 1.3)
    judge(slow, range(1151, 1201), 1.15)  # not so slow that it would be noted, and not recovered
    judge(slow, range(1201, 1251), 1.3)
    judge(slow, range(1251, 1301), 1.05)
    judge(slow, range(1301, 1400), 1.3)
    text = (
        "rank 2 (host-2, cuda:2) is slow: 1.3 s a step outside of collectives, 30% more than the others over"
    )
    text += " the last 50 steps; all ranks wait for it"
    assert slow.notes == [f"step {step}: {text}" for step in (1050, 1350)]
    assert slow._ranks.gathers == 2, "the ranks speak only when there is news"
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(row["step"], row["rank"]) for row in rows] == [(1050, 2), (1350, 2)]
    assert slow_ranks(tmp_path / FILE) == [f"step {step:,}: {text}" for step in (1050, 1350)]


def test_a_stall_of_one_window_is_not_noted(slow):
    for begin in range(1001, 2000, 50):
        judge(slow, range(begin, begin + 25), 3.0)
        judge(slow, range(begin + 25, begin + 50), 1.19)
    assert not slow.notes


def test_a_note_that_cannot_be_written_does_not_end_the_run(tmp_path):
    notes: list[str] = []
    slow = SlowRanks(OnHosts(), tmp_path / "gone", 0, notes.append)
    judge(slow, range(1, 51), 2.0)
    assert len(notes) == 1


def test_only_the_first_rank_writes(tmp_path: Path):
    ranks = OnHosts()
    ranks.rank = 1
    judge(SlowRanks(ranks, tmp_path, 0, lambda text: None), range(51), 2.0)
    assert ranks.gathers == 1
    assert not list(tmp_path.iterdir())


def test_a_report_of_a_run_that_crashed_while_it_noted_has_the_whole_lines(tmp_path: Path):
    file = tmp_path / FILE
    assert slow_ranks(file) == []
    file.write_text('{"step": 50, "rank": 1, "text": "rank 1"}\n{"step": 100, "ra')
    assert slow_ranks(file) == ["step 50: rank 1"]
    file.write_text("[1]}\n")
    assert slow_ranks(file) == ["slow_ranks.jsonl skipped: not readable"]


@pytest.fixture
def two_ranks() -> Iterator[Callable[[Callable[[int], object]], list[object]]]:
    """Runs a function as two ranks, threads of this process; what waits is left out of the clock of each."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()

    def run(work: Callable[[int], object]) -> list[object]:
        def be(rank: int) -> object:
            dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
            try:
                return work(rank)
            except BaseException as error:
                threaded.ProcessLocalGroup.exception_handle(error)
                raise

        with ThreadPoolExecutor(2) as ranks:
            return list(ranks.map(be, range(2)))

    yield run
    threaded._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


@pytest.mark.parametrize("where", ["data", "before", "after"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=["sharded", "replicated"])
def test_a_rank_that_sleeps_has_the_steps_of_the_other_and_more_time_of_its_own(
    two_ranks, where, shape, monkeypatch
):
    """Of real sharded modules and collectives: it sleeps while it reads, before or after its forward."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    clocks = threading.local()

    def train(rank: int) -> tuple[float, float]:
        clocks.own = clock = PhaseClock()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        lasted = []
        for _ in range(9):
            began = time.perf_counter()
            for phase in ("data", "wait", "forward_backward"):
                clock.enter(phase)
                if phase == "wait":
                    dist.barrier()
                slept = {"data": "data", "forward_backward": "before"}.get(phase)
                time.sleep(0.05 * (rank == 1 and slept == where))
            output = model(torch.ones(8, 64))
            time.sleep(0.05 * (rank == 1 and where == "after"))
            output.sum().backward()
            clock.enter("log")
            clock.take()
            lasted.append(time.perf_counter() - began)
        return median(lasted), clock.own()

    with collectives_within(lambda collective: clocks.own.wait(collective), blocking=True):
        (step, own), (slow_step, slow_own) = two_ranks(train)
    assert slow_step == pytest.approx(step, rel=0.2), "the times of the steps do not show it"
    assert slow_own > own + 0.03, "that it works longer does"
