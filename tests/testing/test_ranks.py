"""The kit's own ranks: what comes of those that fail, that take too long, and whose parent is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_core.errors import ContractError
from mm_core.processes import alive
from mm_core.testing.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_ranks_return_by_rank_and_a_failure_is_its_error() -> None:
    assert on_ranks(2, math.sqrt, 4.0) == [2.0, 2.0]
    with pytest.raises(ContractError, match="ValueError: "):
        on_ranks(2, math.sqrt, -1.0)


def facts(name: str) -> list[object]:
    return [os.environ["RANK"], os.environ[name], str(Path.cwd()), sys.path[-1], os.getppid(), hash(name)]


def test_a_rank_has_what_its_caller_has_and_a_hash_of_its_own(
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
        assert one[:4] == ["0", value, str(folder), str(folder)] and other[0] == "1"
        assert one[5] != other[5]
        found.append([one[4], other[4]])
    assert found[0] == found[1]


def test_a_rank_or_its_origin_that_dies_is_named_and_the_next_call_has_others() -> None:
    for end in (os._exit, ends_its_origin):
        with pytest.raises(ContractError, match=r"rank \d of 2 ended with exit code (7|-9)"):
            on_ranks(2, end, 7)
        assert on_ranks(2, math.sqrt, 4.0) == [2.0, 2.0]


def ends_its_origin(code: int) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(code)


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
    end, ranks = time.monotonic() + 120, list[int]()
    while len(ranks) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        origins = children(command.pid)
        ranks = [rank for origin in origins for rank in children(origin)]
    command.kill()
    command.wait()
    assert len(ranks) == 2
    end = time.monotonic() + 20
    while any(alive(pid) for pid in (*origins, *ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in (*origins, *ranks))
