"""Runs a script as several real ranks on gloo, without a launcher: for tests of the engine and loop."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a child that imports `support` as tests do."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: str | Path, world: int, *args: object, timeout: float = 240) -> list[str]:
    """Standard output of each rank; AssertionError with the output of a rank that fails."""
    port = free_port()
    ranks = []
    for rank in range(world):
        own = environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, str(script), *map(str, args)]
        ranks.append(
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # one that hangs does not outlive the test
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank} exited with {process.returncode}:\n{output}"
    return outputs
