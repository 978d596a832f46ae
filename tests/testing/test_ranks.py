"""The kit's own ranks: what comes of those that fail, that take too long, and whose parent is killed."""

from __future__ import annotations

import math
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


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(ContractError, match=r"2 ranks were stopped after 15 s; rank \d still ran"):
        on_ranks(2, time.sleep, 600.0, timeout=15)


def test_ranks_end_by_themselves_when_the_command_is_killed() -> None:
    program = (
        "import time; from mm_core.testing.ranks import on_ranks; on_ranks(2, time.sleep, 600.0, timeout=15)"
    )
    command = subprocess.Popen([sys.executable, "-c", program])
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    if not children.exists():
        command.kill()
        pytest.skip("only Linux with this file names the children of a process")
    end = time.monotonic() + 120
    while len(ranks := children.read_text().split()) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    command.kill()
    command.wait()
    assert len(ranks) == 2
    while any(alive(int(pid)) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(int(pid)) for pid in ranks)
