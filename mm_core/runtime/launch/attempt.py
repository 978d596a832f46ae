"""One start of the ranks of a host through torch's elastic launcher, and how they ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mm_core.errors import MMError
from mm_core.processes import alive, usable_cores
from mm_core.runtime.launch.launch_folder import FAILED, LAUNCH_DIR, LOST, STOPPED_EARLY, LaunchFolder
from mm_core.runtime.launch.meeting import Nodes
from mm_core.runtime.launch.rank_process import GRACE
from mm_core.runtime.launch.restarts import RESTART, End
from mm_core.runtime.launch.signals import PASSING, STOPPED, show_cursor

ENDING = 30.0
"""Seconds that torch's agent gives the other ranks of a host, which may still be starting, to end."""


class Attempt:
    """One start of the ranks of this host by torch's elastic agent."""

    def __init__(self, nodes: Nodes, command: Sequence[str], folder: LaunchFolder) -> None:
        self.nodes, self.command, self.folder = nodes, command, folder
        self.failures: Mapping[int, Any] = {}
        self.fault: BaseException | None = None
        self.started = self.killed = False  # whether a rank has started; whether all are killed
        self._failed_at: float | None = None
        self._sent: set[tuple[int, int]] = set()

    def work(self) -> End:
        """Runs torch's launcher (the elastic agent), in a thread, until all ranks have ended.

        In the main thread it would handle signals itself and kill all ranks 30 s after one; in a thread, a
        long save completes.

        Raises:
            MMError: no rank could be started.
        """
        agent = threading.Thread(target=self._agent, name="elastic agent", daemon=True)
        agent.start()
        gone_at: float | None = None
        while agent.is_alive():
            agent.join(0.1)
            # Torch's agent waits 5 minutes for the agents of other hosts, which may be lost; for a store that
            # is out of reach, until the system gives up the connection.
            gone = self.started and not any(map(alive, self.folder.pids()))
            gone_at = (gone_at or time.monotonic()) if gone else None
            patience = 2 * GRACE + ENDING * self.folder.failing()
            if gone_at is not None and time.monotonic() - gone_at > patience:
                break
        if self.fault is not None or (agent.is_alive() and self.folder.failing()):
            return self._broken(self.fault)
        return self._end()

    def _agent(self) -> None:
        try:
            self._elastic()
        except BaseException as fault:
            self.started = self.started or bool(self.folder.pids())
            self.fault = fault

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        nodes = self.nodes
        rendezvous: dict[str, Any] = {"join_timeout": 120}  # the hosts have met already
        if nodes.hosts_meeting is not None:
            rendezvous["is_host"] = nodes.hosts_meeting
        config = LaunchConfig(
            min_nodes=nodes.least,
            max_nodes=nodes.most,
            nproc_per_node=nodes.nproc,
            run_id=nodes.run_id or uuid.uuid4().hex,
            rdzv_endpoint=nodes.endpoint or "localhost:0",
            rdzv_backend="c10d",
            rdzv_configs=rendezvous,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=f"{self.folder.path}/torch"),
            local_addr="localhost" if nodes.endpoint is None else None,
        )
        try:
            elastic_launch(config, self.command[0])(*self.command[1:])
        except ChildFailedError as error:
            self.failures = error.failures

    def deliver(self, asked: Sequence[signal.Signals]) -> None:
        """Sends signals to the ranks that have not received them, also to those that are still starting."""
        pids = self.folder.pids()
        self.started = self.started or bool(pids)
        self._failed_at = (self._failed_at or time.monotonic()) if self.folder.failing() else None
        # A rank that a signal has stopped (SIGSTOP) cannot end itself, and torch's agent gives it 30 s.
        late = self._failed_at is not None and time.monotonic() - self._failed_at > 2 * GRACE
        for pid in pids:
            with suppress(ProcessLookupError):
                if self.killed or late:
                    os.kill(pid, signal.SIGKILL)
                for index, given in enumerate(asked):
                    if (pid, index) not in self._sent:
                        self._sent.add((pid, index))
                        os.kill(pid, given)

    def _end(self) -> End:
        """How the ranks ended. Prints the error if no rank could print it."""
        if self.killed:
            show_cursor()
            return End(130, "interrupted", asked=True)
        if not self.failures:
            return End(STOPPED if self.folder.read(STOPPED_EARLY) is not None else 0)
        codes = {rank: int(failure.exitcode) for rank, failure in self.failures.items()}
        # The agent ends the other ranks with SIGTERM. Its times are whole seconds: of ranks that ended in one
        # second, one that a signal ended counts before those that lost the connection to it.
        rank = min(
            codes, key=lambda r: (codes[r] == -signal.SIGTERM, int(self.failures[r].timestamp), codes[r] > 0)
        )
        code, printed = codes[rank], self.folder.read(FAILED)
        if printed is not None:
            given, _, what = printed.partition(" ")
            return End(int(given) if given and code > 0 else _exit_code(code), what or _ended(rank, code))
        if self.folder.read(STOPPED_EARLY) is not None and code == 1:
            return End(STOPPED)  # this rank lost the connection to ranks that stopped on request
        show_cursor()
        if code in (130, -signal.SIGINT):
            sys.stderr.write("mm: interrupted\n")
            return End(130, "interrupted", asked=True)
        lost = self.folder.read(LOST) if code == 1 else None
        message = f"rank {rank}: {lost}" if lost is not None else _ended(rank, code)
        log = self.folder.read(f"log_{rank}")
        sys.stderr.write(f"mm: error: {message}\n" + (f"  log: {log}\n" if log is not None else ""))
        own = lost is None
        return End(_exit_code(code) if own else PASSING, message.splitlines()[0].partition(";")[0], own)

    def _broken(self, fault: BaseException | None) -> End:
        """The agent failed, before any rank had started or because the rendezvous host is gone, for which it
        waits if there is no fault."""
        if fault is not None and not self.started:
            raise not_started(fault, self.nodes)
        given, _, what = (self.folder.read(FAILED) or "").partition(" ")
        if given:  # a rank has printed its own error
            return End(int(given), what)
        lost = self.folder.read(LOST) or f"lost the launcher at {self.nodes.endpoint or 'localhost'}"
        if self.folder.read(FAILED) is None:
            show_cursor()
            sys.stderr.write(f"mm: error: {lost}\n")
        return End(PASSING, lost.splitlines()[0], own=False)


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code


def _ended(rank: int, code: int) -> str:
    """The error message for a rank that ended without printing one."""
    if code >= 0:
        return f"rank {rank} exited with code {code} without an error message"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"rank {rank} was killed ({name}); the usual reason is that the host ran out of memory\n"
            "  hint: use fewer data.loader.workers, a smaller train.micro_batch_size, or"
            " engine.recompute_modules=auto; the kernel log (dmesg) shows which process was killed and why"
        )
    if -code == signal.SIGBUS:
        return (
            f"rank {rank} was ended by {name}; the usual reason is that shared memory (/dev/shm) is full\n"
            "  hint: enlarge it (docker run --shm-size), or use fewer data.loader.workers"
        )
    return f"rank {rank} was ended by the signal {name}"


def not_started(error: BaseException, nodes: Nodes) -> MMError:
    """The error for a launch that failed before any rank started, for example if hosts cannot connect."""
    text = " ".join(str(error).split()) or type(error).__name__
    hint = (
        f"check that {nodes.endpoint} is reachable from every host, and that --rdzv-endpoint, --rdzv-id and"
        " --nnodes are the same on all of them"
    )
    fault = MMError(
        f"the ranks could not be started: {text[:400]}", hint=hint if nodes.endpoint is not None else None
    )
    fault.passing = nodes.endpoint is not None  # a host may have been lost
    return fault


@contextmanager
def environment(folder: Path, nproc: int, restart: int) -> Iterator[None]:
    """Sets what ranks inherit: the launch folder, their share of the cores, the number of the restart."""
    wanted = {LAUNCH_DIR: str(folder)}
    if "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = str(max(1, usable_cores() // nproc))
    if restart:
        wanted[RESTART] = str(restart)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
