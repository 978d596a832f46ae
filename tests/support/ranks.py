"""Runs a script on several real gloo ranks without a launcher, for tests of engine and loop."""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from support import warm

TESTS = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a child that imports `support` as tests do."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


_PORTS = itertools.cycle(random.Random(os.getpid()).sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """A port at which nobody listens, below those that the system gives to outgoing connections: between
    this answer and its use, one of these could take the port, and ranks would wait for each other in vain."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports go round")


def run_ranks(script: str | Path, world: int, *args: object, timeout: float = 240) -> list[str]:
    """Standard output of each rank; AssertionError with the outputs of ranks that fail."""
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    with ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        try:
            for rank, out in enumerate(said):
                own = environment(RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", **meeting)
                words = [sys.executable, str(script), *map(str, args)]
                ranks.append(warm.Process(words, own, stdout=out, stderr=out))
            codes = [process.wait(timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()  # one that hangs does not outlive the test
        outputs = []
        for out in said:
            out.seek(0)
            outputs.append(out.read())
        # One that a signal ended comes first: the others have only lost it.
        failed = sorted((code, rank) for rank, code in enumerate(codes) if code)
        texts = [f"rank {rank} exited with {code}:\n{outputs[rank]}" for code, rank in failed]
        assert not failed, "\n".join(texts)
    return outputs
