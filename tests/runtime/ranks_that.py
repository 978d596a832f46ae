"""Ranks that do what a test asks for, without the cost of a real run: `python ranks_that.py launch SCENARIO`
starts two of them through the launcher, `python ranks_that.py SCENARIO` is one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mm_core.errors import DataError, PeerError
from mm_core.runtime.launch.launch_folder import FAILED, LaunchFolder
from mm_core.runtime.launch.rank_logs import rank_log
from mm_core.runtime.launch.rank_process import leave, run_as_rank
from mm_core.runtime.launch.signals import STOPPED, StopFlag
from mm_core.telemetry.progress import make_progress

RANK = int(os.environ.get("RANK", "0"))


def wait_deafly() -> None:
    """Waits in C for a minute or more, as in a collective that does not notice a dead peer."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        time.sleep(100)


def say(line: str) -> None:
    """One write a line: two ranks share the stream, and `print` may write the line's end apart."""
    os.write(1, f"{line}\n".encode())


def join_gloo() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def do(scenario: str, stop: StopFlag) -> int:
    """One rank's part; rank 1 is the one that goes wrong."""
    say(f"rank {RANK} pid {os.getpid()} threads {os.environ.get('OMP_NUM_THREADS')}")
    if scenario == "fine":
        return 0
    if scenario == "stop":
        Path(f"ready_{RANK}").touch()
        while stop.requested is None:
            time.sleep(0.05)
        time.sleep(1.5)  # saving
        say(f"rank {RANK} saved after {stop.requested}")
        return STOPPED
    if scenario in ("same", "error"):
        # Both get to speak: the launcher ends a rank that is still starting when the other has failed.
        Path(f"found_{RANK}").touch()
        while not (Path("found_0").exists() and Path("found_1").exists()):
            time.sleep(0.01)
    if scenario == "same":
        raise DataError("a fault of the input that every rank finds", where="data.json")
    if scenario == "late" and RANK == 0:
        raise PeerError("rank 1 failed to read its samples")
    if scenario == "gloo":
        import torch.distributed as dist

        join_gloo()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    if scenario == "lost":  # the first host fails; the second has nothing to say for itself
        import torch.distributed as dist

        join_gloo()
        if RANK == 0:
            raise DataError("nothing can be read here", where="clip 3")
        dist.barrier()
    if RANK == 0 and scenario.startswith("bar"):
        make_progress(10, 0).note("a bar is open")
        Path("open").touch()
        while scenario == "bar_killed" and LaunchFolder.current().read(FAILED) is None:
            time.sleep(0.05)
        if scenario == "bar_killed":  # after the other has spoken
            os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0:
        wait_deafly()
    if scenario.startswith("bar"):
        while not Path("open").exists():
            time.sleep(0.05)
        raise DataError("nothing can be read here", where="clip 3")
    if scenario == "late":
        time.sleep(1)
    if scenario in ("error", "late"):
        raise DataError("nothing can be read here", where="clip 3", hint="look at it")
    if scenario == "bug":
        raise KeyError("a bug in the model")
    if scenario == "exit":
        sys.exit(3)
    if scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario in ("logged_error", "logged_crash", "logged_kill"):
        with rank_log(Path("run"), RANK, 2):
            if scenario == "logged_error":
                raise DataError("nothing can be read here", where="clip 3", hint="look at it")
            os.kill(os.getpid(), signal.SIGKILL if scenario == "logged_kill" else signal.SIGSEGV)
    raise AssertionError(scenario)


def main() -> None:
    if sys.argv[1] != "launch":
        with StopFlag() as stop:
            leave(run_as_rank(lambda: do(sys.argv[1], stop)))
    from mm_core.errors import MMError
    from mm_core.runtime.launch.launcher import launch
    from mm_core.runtime.launch.meeting import Nodes

    nodes = Nodes(2) if len(sys.argv) == 3 else Nodes(1, 2, 2, sys.argv[3], "meeting")
    try:
        leave(launch([sys.executable, __file__, sys.argv[2]], nodes))
    except MMError as error:
        sys.stderr.write(f"mm: error: {error}\n")
        leave(1)


if __name__ == "__main__":
    main()
