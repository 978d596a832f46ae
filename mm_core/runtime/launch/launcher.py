"""Starts ranks through torch's elastic launcher, forwards signals to them, and tells how they ended."""

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

from mm_core.errors import MMError
from mm_core.runtime.launch.launch_folder import FAILED, LAUNCH_DIR, LOST, STOPPED_EARLY, LaunchFolder
from mm_core.runtime.launch.signals import STOPPED, StopFlag, show_cursor

COMMAND = (sys.executable, "-P", "-m", "mm_core.cli.main")
"""What starts another `mm`. Without -P the folder that the command is typed in, perhaps a stranger's, would
shadow any module."""

UNSTARTED = 5.0
"""Seconds after a signal in which a first rank must show; else nothing runs yet and the launcher leaves."""

WAITING = 5.0
"""Seconds without a rank after which the launcher says that it waits for other hosts."""


@dataclass(frozen=True)
class Nodes:
    """How many processes run where.

    nproc: ranks on this host. least, most: hosts. endpoint: HOST:PORT where hosts meet; none for one
    host. run_id: the same on every host. hosts_meeting: whether the endpoint is this host; None lets
    torch compare names and addresses.
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
        self._met = self._told = False  # whether a rank has shown itself; whether the wait was spoken of
        self._began = time.monotonic()
        self._asked: list[tuple[signal.Signals, float]] = []
        self._sent: set[tuple[int, int]] = set()

    # -- in the agent's thread -----------------------------------------------------------------

    def work(self) -> None:
        """Runs the agent. In the main thread it would take the signals itself and kill all ranks 30 s
        after one; here, in another thread, a long save completes."""
        try:
            self._elastic()
        except BaseException as error:  # goes to the main thread, which says it
            self.fault = error

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        nodes = self.nodes
        meeting: dict[str, Any] = {"timeout": 900}
        if nodes.hosts_meeting is not None:
            meeting["is_host"] = nodes.hosts_meeting
        config = LaunchConfig(
            min_nodes=nodes.least,
            max_nodes=nodes.most,
            nproc_per_node=nodes.nproc,
            run_id=nodes.run_id or (uuid.uuid4().hex if nodes.endpoint is None else "mm_core"),
            rdzv_endpoint=nodes.endpoint or "localhost:0",
            rdzv_backend="c10d",
            rdzv_configs=meeting,
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
        """Hands a signal to every rank, also to those that are only starting."""
        self._asked.append((given, time.monotonic()))
        self.deliver()

    def kill(self) -> None:
        """Ends every rank at once (a second Ctrl-C)."""
        self.killed = True
        self.deliver()

    def deliver(self) -> None:
        """Sends what is asked for to the ranks that have not got it."""
        for pid in self.folder.pids():
            self._met = True
            with suppress(ProcessLookupError):
                if self.killed:
                    os.kill(pid, signal.SIGKILL)
                for index, (given, _) in enumerate(self._asked):
                    if (pid, index) not in self._sent:
                        self._sent.add((pid, index))
                        os.kill(pid, given)

    def tell_waiting(self) -> None:
        """Says once that other hosts are missing, so that nobody watches a silent command for minutes."""
        if self._met or self._told or self.nodes.endpoint is None or time.monotonic() - self._began < WAITING:
            return
        self._told = True
        sys.stderr.write(
            f"mm: waits at {self.nodes.endpoint} until all of {self.nodes.least} hosts have come,"
            " 15 minutes at most\n"
        )

    def abandoned(self) -> int | None:
        """The exit code when a signal came before any rank was there (hosts still wait for others)."""
        if not self._asked or self._sent:
            return None
        given, when = self._asked[0]
        return 128 + given if self.killed or time.monotonic() - when > UNSTARTED else None

    def exit_code(self) -> int:
        """0, the code of a requested stop, or that of the first rank that failed, with a sentence where
        no rank could say one."""
        if self.killed:
            show_cursor()
            return 130
        if self.fault is not None:
            return self._broken(self.fault)
        if not self.failures:
            return STOPPED if self.folder.read(STOPPED_EARLY) is not None else 0
        codes = {rank: int(failure.exitcode) for rank, failure in self.failures.items()}
        # The agent ends the rest with SIGTERM. Its times are whole seconds: a rank that a signal ended
        # comes before those that lost it.
        rank = min(
            codes, key=lambda r: (codes[r] == -signal.SIGTERM, int(self.failures[r].timestamp), codes[r] > 0)
        )
        code = codes[rank]
        if self.folder.read(FAILED) is None:
            if self.folder.read(STOPPED_EARLY) is not None and code == 1:
                return STOPPED  # it has lost those that left on request
            show_cursor()
            if code in (130, -signal.SIGINT):
                sys.stderr.write("mm: interrupted\n")
                return 130
            lost = self.folder.read(LOST)
            said = f"rank {rank}: {lost}" if lost is not None and code == 1 else _ended(rank, code)
            log = self.folder.read(f"log_{rank}")
            sys.stderr.write(f"mm: error: {said}\n" + (f"  log: {log}\n" if log is not None else ""))
        return code if code > 0 else 128 - code

    def _broken(self, fault: BaseException) -> int:
        """The agent itself failed: before any rank was there, or because the meeting's host has left."""
        if not self._met:
            raise not_started(fault, self.nodes)
        if self.folder.read(FAILED) is None:
            show_cursor()
            lost = self.folder.read(LOST) or f"lost the launcher at {self.nodes.endpoint or 'localhost'}"
            sys.stderr.write(f"mm: error: {lost}\n")
        return 1


def _ended(rank: int, code: int) -> str:
    """A sentence for a rank that could not say one."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and said nothing"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"rank {rank} was killed ({name}); the usual reason is that the host ran out of memory\n"
            "  hint: fewer data.loader.workers, a smaller train.micro_batch_size, or"
            " engine.recompute_modules=auto; the kernel's log (dmesg) names what it killed"
        )
    if -code == signal.SIGBUS:
        return (
            f"rank {rank} was ended by {name}; the usual reason is that shared memory (/dev/shm) is full\n"
            "  hint: enlarge it (docker run --shm-size), or fewer data.loader.workers"
        )
    return f"rank {rank} was ended by {name}"


def not_started(fault: BaseException, nodes: Nodes) -> MMError:
    """The sentence for an agent that failed before any rank ran, as when hosts do not find each other."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    hint = (
        f"is {nodes.endpoint} reachable from every host, and are --rdzv-endpoint, --rdzv-id and --nnodes the"
        " same on all of them?"
    )
    return MMError(
        f"the ranks could not be started: {text[:400]}", hint=hint if nodes.endpoint is not None else None
    )


def quiet_torch() -> None:
    """Imports torch without its C++ log, for a process that launches and does not train: a meeting that
    fails is otherwise pages of native frames above our sentence. Ranks keep their log."""
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    if before is None and os.environ.get("MM_DEBUG", "0") in ("", "0"):
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # read once, when torch is imported
    import torch  # noqa: F401

    if before is None:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)


@contextmanager
def _environment(folder: Path, nproc: int) -> Iterator[None]:
    """What ranks inherit: the folder in which they meet, and their share of the cores."""
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
    """Runs a command as every rank of this host and returns the exit code of the whole.

    Args:
        command: program and arguments; the program ends in `mm_core.runtime.launch.rank_process.run_as_rank`.
        nodes: how many processes, and where they meet.
        announce: say that a signal was heard, and that the ranks save before they end.
        outlives_interrupts: a second Ctrl-C is handed to the ranks as the first one is, and kills none.

    Returns:
        0; 75 when the ranks saved and stopped on request; 130 after a second Ctrl-C; else the code of
        the first rank that failed, 128 + the signal for one that a signal ended.

    Raises:
        MMError: when the ranks cannot be started.
    """
    quiet_torch()
    folder = Path(tempfile.mkdtemp(prefix="mm_core-"))
    meeting = LaunchFolder(folder, has_parent=True)
    meeting.open()
    running = _Launch(nodes, command, meeting)
    again = partial(running.ask, signal.SIGINT) if outlives_interrupts else running.kill
    thread = threading.Thread(target=running.work, name="elastic agent", daemon=True)
    logging.disable(logging.CRITICAL)  # the agent's own account of failures: ranks say it better
    try:
        with (
            _environment(folder, nodes.nproc),
            StopFlag(announce=announce, on_signal=running.ask, on_second=again),
        ):
            thread.start()
            while thread.is_alive():
                thread.join(0.1)  # a join without a limit would keep signals waiting
                running.deliver()
                running.tell_waiting()
                if (code := running.abandoned()) is not None:
                    sys.stderr.write("mm: no rank had started\n")
                    return code
        ended = running.exit_code()
        if ended:
            show_cursor("")  # a rank that was killed after another had spoken left it hidden
        return ended
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
