"""Starts ranks through torch's elastic launcher, forwards signals to them, and reports how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mm_core.errors import MMError, plural
from mm_core.runtime.launch.launch_folder import FAILED, LAUNCH_DIR, LOST, STOPPED_EARLY, LaunchFolder
from mm_core.runtime.launch.signals import STOPPED, StopFlag, show_cursor

COMMAND = (sys.executable, "-P", "-m", "mm_core.cli.main")
"""The command line that starts another `mm`. Without -P, modules in the current folder, which may be a
stranger's, would shadow any other module."""

UNSTARTED = 5.0
"""Seconds after a signal within which a first rank must start; otherwise the launcher exits."""

WAITING = 5.0
"""Seconds without a rank after which the launcher reports that it is waiting for other hosts."""


@dataclass(frozen=True)
class Nodes:
    """How many ranks and hosts a launch has, and where the hosts connect to each other (the rendezvous).

    Attributes:
        nproc: ranks on this host.
        least: the smallest number of hosts.
        most: the largest number of hosts.
        endpoint: HOST:PORT of the rendezvous; None for one host.
        run_id: the rendezvous id, the same on every host.
        hosts_meeting: whether the rendezvous runs on this host; None: torch compares names and addresses.
    """

    nproc: int
    least: int = 1
    most: int = 1
    endpoint: str | None = None
    run_id: str | None = None
    hosts_meeting: bool | None = None


class _Launch:
    """One launch: the elastic agent in a thread, signals in the main thread."""

    def __init__(self, nodes: Nodes, command: Sequence[str], folder: LaunchFolder) -> None:
        self.nodes, self.command, self.folder = nodes, command, folder
        self.failures: Mapping[int, Any] = {}
        self.fault: BaseException | None = None
        self.killed = False
        self._started = self._reported = False  # whether a rank has started; whether waiting was reported
        self._began = time.monotonic()
        self._asked: list[tuple[signal.Signals, float]] = []
        self._sent: set[tuple[int, int]] = set()

    # -- in the agent's thread -----------------------------------------------------------------

    def work(self) -> None:
        """Runs torch's launcher (the elastic agent) in a thread, until all ranks have ended.

        In the main thread it would handle signals itself and kill all ranks 30 s after one; in a thread, a
        long save completes.
        """
        try:
            self._elastic()
        except BaseException as error:  # the main thread reports it
            self.fault = error

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        nodes = self.nodes
        rendezvous: dict[str, Any] = {"timeout": 900}
        if nodes.hosts_meeting is not None:
            rendezvous["is_host"] = nodes.hosts_meeting
        config = LaunchConfig(
            min_nodes=nodes.least,
            max_nodes=nodes.most,
            nproc_per_node=nodes.nproc,
            run_id=nodes.run_id or (uuid.uuid4().hex if nodes.endpoint is None else "mm_core"),
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

    # -- in the main thread --------------------------------------------------------------------

    def ask(self, given: signal.Signals) -> None:
        """Forwards a signal to every rank, including ranks that are still starting."""
        self._asked.append((given, time.monotonic()))
        self.deliver()

    def kill(self) -> None:
        """Kills every rank at once (after a second Ctrl-C)."""
        self.killed = True
        self.deliver()

    def deliver(self) -> None:
        """Sends the pending signals to the ranks that have not received them."""
        for pid in self.folder.pids():
            self._started = True
            with suppress(ProcessLookupError):
                if self.killed:
                    os.kill(pid, signal.SIGKILL)
                for index, (given, _) in enumerate(self._asked):
                    if (pid, index) not in self._sent:
                        self._sent.add((pid, index))
                        os.kill(pid, given)

    def report_waiting(self) -> None:
        """Reports once that the launcher is waiting for other hosts, instead of minutes without output."""
        if (
            self._started
            or self._reported
            or self.nodes.endpoint is None
            or time.monotonic() - self._began < WAITING
        ):
            return
        self._reported = True
        sys.stderr.write(
            f"mm: waiting at {self.nodes.endpoint} for {plural(self.nodes.least, 'host')}"
            " (up to 15 minutes)\n"
        )

    def abandoned(self) -> int | None:
        """The exit code if a signal arrived before any rank had started; None otherwise."""
        if not self._asked or self._sent:
            return None
        given, when = self._asked[0]
        return 128 + given if self.killed or time.monotonic() - when > UNSTARTED else None

    def exit_code(self) -> int:
        """The launcher's exit code: 0, 75 after a requested stop, or the code of the first rank that failed.

        Prints an error message if no rank could print one.
        """
        if self.killed:
            show_cursor()
            return 130
        if self.fault is not None:
            return self._broken(self.fault)
        if not self.failures:
            return STOPPED if self.folder.read(STOPPED_EARLY) is not None else 0
        codes = {rank: int(failure.exitcode) for rank, failure in self.failures.items()}
        # The agent ends the other ranks with SIGTERM. Its times are whole seconds: of ranks that ended in one
        # second, one that a signal ended counts before those that lost the connection to it.
        rank = min(
            codes, key=lambda r: (codes[r] == -signal.SIGTERM, int(self.failures[r].timestamp), codes[r] > 0)
        )
        code = codes[rank]
        if self.folder.read(FAILED) is None:
            if self.folder.read(STOPPED_EARLY) is not None and code == 1:
                return STOPPED  # this rank lost the connection to ranks that stopped on request
            show_cursor()
            if code in (130, -signal.SIGINT):
                sys.stderr.write("mm: interrupted\n")
                return 130
            lost = self.folder.read(LOST)
            message = f"rank {rank}: {lost}" if lost is not None and code == 1 else _ended(rank, code)
            log = self.folder.read(f"log_{rank}")
            sys.stderr.write(f"mm: error: {message}\n" + (f"  log: {log}\n" if log is not None else ""))
        return code if code > 0 else 128 - code

    def _broken(self, fault: BaseException) -> int:
        """The agent itself failed: before any rank had started, or because the rendezvous host is gone."""
        if not self._started:
            raise not_started(fault, self.nodes)
        if self.folder.read(FAILED) is None:
            show_cursor()
            lost = self.folder.read(LOST) or f"lost the launcher at {self.nodes.endpoint or 'localhost'}"
            sys.stderr.write(f"mm: error: {lost}\n")
        return 1


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


def not_started(fault: BaseException, nodes: Nodes) -> MMError:
    """The error for a launch that failed before any rank started, for example if hosts cannot connect."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    hint = (
        f"check that {nodes.endpoint} is reachable from every host, and that --rdzv-endpoint, --rdzv-id and"
        " --nnodes are the same on all of them"
    )
    return MMError(
        f"the ranks could not be started: {text[:400]}", hint=hint if nodes.endpoint is not None else None
    )


def quiet_torch() -> None:
    """Imports torch without its C++ log, for a process that launches ranks but does not train.

    Otherwise a failed rendezvous prints pages of native frames above the error message. Ranks keep the log.
    """
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    if before is None and os.environ.get("MM_DEBUG", "0") in ("", "0"):
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # read once, when torch is imported
    import torch  # noqa: F401

    if before is None:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)


@contextmanager
def _environment(folder: Path, nproc: int) -> Iterator[None]:
    """Sets the environment that ranks inherit: the launch folder, and their share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {LAUNCH_DIR: str(folder)}
    if "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // nproc))
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


def launch(
    command: Sequence[str], nodes: Nodes, announce: bool = True, outlives_interrupts: bool = False
) -> int:
    """Launches a command as every rank of this host and returns the exit code of the launch.

    Args:
        command: program and arguments; the program calls `mm_core.runtime.launch.rank_process.run_as_rank`.
        nodes: how many ranks, and the rendezvous of the hosts.
        announce: report a received signal, and that the ranks save before they end.
        outlives_interrupts: forward a second Ctrl-C to the ranks instead of killing them.

    Returns:
        0; 75 if the ranks saved and stopped on request; 130 after a second Ctrl-C; otherwise the code of the
        first rank that failed, or 128 + signal number if a signal ended it.

    Raises:
        MMError: the ranks cannot be started.
    """
    quiet_torch()
    folder = Path(tempfile.mkdtemp(prefix="mm_core-"))
    launch_folder = LaunchFolder(folder, has_parent=True)
    launch_folder.open()
    running = _Launch(nodes, command, launch_folder)
    again = partial(running.ask, signal.SIGINT) if outlives_interrupts else running.kill
    thread = threading.Thread(target=running.work, name="elastic agent", daemon=True)
    logging.disable(logging.CRITICAL)  # the agent's own report of failures: the ranks' reports are better
    try:
        with (
            _environment(folder, nodes.nproc),
            StopFlag(announce=announce, on_signal=running.ask, on_second=again),
        ):
            thread.start()
            while thread.is_alive():
                thread.join(0.1)  # a join without a timeout would delay signal handlers
                running.deliver()
                running.report_waiting()
                if (code := running.abandoned()) is not None:
                    sys.stderr.write("mm: stopped before any rank had started\n")
                    return code
        ended = running.exit_code()
        if ended:
            show_cursor("")  # a rank killed after another one had printed its error left it hidden
        return ended
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
