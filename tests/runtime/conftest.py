"""Launchers as real processes, and what is left of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support import ranks, warm

HERE = Path(__file__).parent
SCRIPT = Path(__file__).with_name("ranks_that.py")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code.
        out: standard output.
        err: standard error.
        seconds: time from its start to the end of its last process.
    """

    code: int
    out: str
    err: str
    seconds: float

    @property
    def pids(self) -> list[int]:
        """The ranks that printed their process id."""
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.out)]


class Running:
    """A command under way, in a session of its own, with signals as a terminal leaves them."""

    def __init__(self, command: list[object], cwd: Path, environment: dict[str, str], anew: bool) -> None:
        self.began = time.monotonic()
        self.command = warm.Running(command, env=os.environ | environment, cwd=cwd, anew=anew)

    def send(self, number: signal.Signals) -> None:
        self.command.process.send_signal(number)

    def end(self, timeout: float = 120) -> Ended:
        """Waits for the last process that holds the output: ranks included."""
        return Ended(*self.command.end(timeout), time.monotonic() - self.began)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Running]]:
    """Starts a Python command in the test's folder; what still runs afterwards is killed.

    With `anew=True` it is not started from the warm server, for tests of launchers that are killed.
    """
    started: list[Running] = []
    warm.address()  # its start is not a part of what is measured

    def begin(*command: object, anew: bool = False, cwd: Path = tmp_path, **environment: str) -> Running:
        started.append(Running(list(command), cwd, environment, anew))
        return started[-1]

    yield begin
    for running in started:
        running.command.process.kill()


@pytest.fixture
def launch(start) -> Callable[..., Ended]:
    """Two ranks of ranks_that.py in a scenario, to their end."""
    return lambda scenario, **environment: start(SCRIPT, "launch", scenario, **environment).end()


@pytest.fixture
def free_port() -> int:
    return ranks.free_port()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Waits for a condition, and fails when it takes too long."""

    def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture
def faulty(tiny, tmp_path):
    """Writes a run of steps that may go wrong, and returns its command."""

    def write(steps: int, every: int = 2, **settings: object) -> list[object]:
        config = yaml.safe_load(tiny.read_text())
        config["task"]["type"], config["data"]["train"]["type"] = "local/faulty_task", "local/faulty_data"
        config["plugins"] = {"path": [str(HERE / "faulty.py")]}
        config["train"] |= {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1}
        config["checkpoint"] = {"every": every}
        config["run"] = config.get("run", {}) | settings
        path = tmp_path / "faulty.yaml"
        path.write_text(yaml.safe_dump(config))
        return ["train", "--config", path, f"run.dir={tmp_path}"]

    return write
