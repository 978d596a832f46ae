"""Ranks that do not find each other: an error with the address, and an end when they are asked to."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from mm_core.errors import MMError
from mm_core.runtime.groups import start_process_group


@pytest.fixture
def rank_of_two(monkeypatch):
    """The variables that torchrun sets."""

    def be(rank: int, port: object) -> None:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**names, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

    return be


def test_a_port_in_use_is_named(rank_of_two):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        rank_of_two(0, taken.getsockname()[1])
        with pytest.raises(MMError) as caught:
            start_process_group()
    port = os.environ["MASTER_PORT"]
    assert (
        caught.value.what
        == f"port {port} is already in use on this host, so the ranks cannot connect to each other there"
    )
    assert caught.value.where == "MASTER_PORT" and "ss -ltnp" in str(caught.value.hint)


@pytest.mark.parametrize("port", ["99999", "abc", "-1"])
def test_a_port_that_is_none_is_refused(rank_of_two, port):
    rank_of_two(0, port)
    with pytest.raises(MMError, match=f"'{port}' is not a port number") as caught:
        start_process_group()
    assert caught.value.accepted == "1 to 65535"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_a_readable_error(rank_of_two, free_port, monkeypatch, rank):
    """Rank 0 waits for the other one, rank 1 for an answer."""
    from datetime import timedelta

    monkeypatch.setattr("mm_core.runtime.groups._patience", [timedelta(seconds=0.3)])
    rank_of_two(rank, free_port)
    with pytest.raises(MMError) as caught:
        start_process_group()
    assert f"not all ranks connected to 127.0.0.1:{free_port} in time" in caught.value.what
    assert "MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same for all ranks" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "pause"), [(0, signal.SIGTERM, 3), (1, signal.SIGUSR1, 3), (0, signal.SIGHUP, 0)]
)
def test_a_rank_that_waits_for_the_others_obeys_signals(
    start, tiny, free_port, tmp_path, rank, number, pause, wait_until
):
    """Also those that came before it waited."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    arguments = ("-m", "mm_core.cli.main", "train", "--config", tiny, f"run.dir={tmp_path}")
    running = start(*arguments, **variables)
    status = Path(f"/proc/{running.command.pid}/status")

    def would_catch() -> bool:
        (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", status.read_text(), re.MULTILINE)
        return bool(int(mask, 16) >> (number - 1) & 1)

    wait_until(would_catch)
    time.sleep(pause)  # until it waits: nothing shows from outside
    running.send(number)
    ended = running.end(timeout=60)
    assert ended.code == 75, ended.err
    said = (
        f"mm: {number.name} received: stopped while waiting for the other ranks to connect; nothing was lost"
    )
    assert said in ended.err and "Traceback" not in ended.err
