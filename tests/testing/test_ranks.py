"""The kit's own ranks: what comes of those that fail, that take too long, and whose parent is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from mm_core.errors import ContractError
from mm_core.processes import alive
from mm_core.testing import ranks
from mm_core.testing.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_ranks_return_by_rank_and_a_failure_is_its_error() -> None:
    assert on_ranks(2, math.sqrt, 4.0) == [2.0, 2.0]
    with pytest.raises(ContractError, match="ValueError: "):
        on_ranks(2, math.sqrt, -1.0)


def facts(name: str) -> list[object]:
    where = [os.environ["RANK"], os.environ[name], str(Path.cwd()), sys.path[-1], os.getppid()]
    return [*where, hash(name), float(torch.rand(1)), np.random.rand(), os.environ["CUDA_VISIBLE_DEVICES"]]


def test_a_rank_has_what_its_caller_has_and_a_hash_and_draws_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second call too, whose ranks come from the processes that the first one started."""
    found = []
    for value in ("first", "second"):
        folder = tmp_path / value
        folder.mkdir()
        monkeypatch.setenv("OWN", value)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
        one, other = on_ranks(2, facts, "OWN")
        assert one[:4] == ["0", value, str(folder), str(folder)] and other[0] == "1" and one[8] == ""
        assert one[5] != other[5]
        found += [one, other]
    assert [row[4] for row in found[:2]] == [row[4] for row in found[2:]]
    assert all(len({row[column] for row in found}) == 4 for column in (6, 7))


def test_a_folder_that_is_gone_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert on_ranks(1, math.sqrt, 4.0) == [2.0]


def ends_its_origin(seconds: float) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(seconds)


def test_a_rank_or_its_origin_that_dies_is_named_and_the_next_call_has_others() -> None:
    for work, argument in ((os._exit, 7), (ends_its_origin, 5.0)):
        with pytest.raises(ContractError, match=r"rank \d of 2 ended with exit code (7|-9)"):
            on_ranks(2, work, argument)
        assert on_ranks(2, math.sqrt, 4.0) == [2.0, 2.0]


def test_an_origin_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(ranks, "_origins", {})
    with pytest.raises(ContractError, match="ended with exit code 1: ImportError: no torch today"):
        on_ranks(1, math.sqrt, 4.0)


def test_threads_and_forked_processes_do_not_take_each_other_s_answers() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda value: on_ranks(2, math.sqrt, value), (1.0, 4.0, 9.0))] == [
            [1.0, 1.0],
            [2.0, 2.0],
            [3.0, 3.0],
        ]
    program = (
        "import math, os, sys; from mm_core.testing.ranks import on_ranks; on_ranks(1, math.sqrt, 4.0)\n"
        "if not os.fork(): sys.exit(0)\n"
        "os.wait(); print(on_ranks(1, math.sqrt, 4.0))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert found.stdout == "[2.0]\n", found.stderr


def test_an_interrupt_ends_ranks_that_wait_for_each_other_at_once() -> None:
    program = (
        "import sys, time; from mm_core.testing.ranks import on_ranks\n"
        "on_ranks(1, time.sleep, 0.0); print('begins', flush=True); on_ranks(2, time.sleep, 600.0)"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"begins\n"
    time.sleep(1.0)
    os.killpg(command.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in command.communicate(timeout=60)[1]


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(ContractError, match=r"2 ranks were stopped after 3 s; rank \d still ran"):
        on_ranks(2, time.sleep, 600.0, timeout=3)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_end_when_the_command_is_killed() -> None:
    program = "import time; from mm_core.testing.ranks import on_ranks; on_ranks(2, time.sleep, 600.0)"
    command = subprocess.Popen([sys.executable, "-c", program])
    if not Path(f"/proc/{command.pid}/task/{command.pid}/children").exists():
        command.kill()
        pytest.skip("only Linux with this file names the children of a process")
    end, found = time.monotonic() + 120, list[int]()
    while len(found) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        origins = children(command.pid)
        found = [rank for origin in origins for rank in children(origin)]
    command.kill()
    command.wait()
    assert len(found) == 2
    end = time.monotonic() + 20
    while any(alive(pid) for pid in (*origins, *found)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in (*origins, *found))
