"""Starts ranks, again after a failure that passes; forwards signals to them, and reports how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mm_core.errors import MMError
from mm_core.runtime.launch.attempt import Attempt, environment, not_started
from mm_core.runtime.launch.launch_folder import LOST, LaunchFolder
from mm_core.runtime.launch.meeting import Asked, Meeting, Nodes
from mm_core.runtime.launch.restarts import Decision, End, Tries, decide, record
from mm_core.runtime.launch.signals import PASSING, STOPPED, StopFlag, show_cursor

COMMAND = (sys.executable, "-P", "-m", "mm_core.cli.main")
"""The command line that starts another `mm`. Without -P, modules in the current folder, which may be a
stranger's, would shadow any other module."""

UNSTARTED = 5.0
"""Seconds after a signal within which a first rank must start; otherwise the launcher exits."""

WAITING = 5.0
"""Seconds without a rank after which the launcher reports that it is waiting for other hosts."""


class _Run:
    """All attempts of a run, in a thread; signals in the main thread."""

    def __init__(self, command: Sequence[str], nodes: Nodes, tries: Tries, last: Decision | None) -> None:
        self.nodes, self.command, self.tries = nodes, list(command), tries
        self.asked: list[signal.Signals] = []
        self.current: Attempt | None = None
        self.code, self.fault = 1, None  # type: int, BaseException | None
        self._asked_at = self._began = time.monotonic()
        self._reported = ""
        start = tries.newest()
        self._last = last or Decision(True, first=start, step=start)  # what followed the last attempt
        self._killed = self._ran = False  # whether all ranks are killed; whether any have been started
        self._waits, self._over = True, False  # whether no rank has ended since the last start; all is over
        several = nodes.endpoint is not None
        self._meeting = Meeting(nodes, tries.facts, lambda: bool(self.asked)) if several else None

    # -- in the thread -------------------------------------------------------------------------

    def work(self) -> None:
        """Starts the ranks until they have ended and do not start again."""
        try:
            self.code = self._attempts()
        except BaseException as fault:  # the main thread reports it
            self.fault = fault
        self._waits, self._over = False, True

    def _attempts(self) -> int:
        while True:
            self._waits = True
            joined = self._joined()
            if isinstance(joined, Decision):
                sys.stderr.write("mm: the run has ended without this host\n")
                return joined.code
            began, last = time.monotonic(), self._last
            if last.number and self.tries.again is not None:
                self.command = list(self.tries.again(last.step is not None and last.step != last.first))
            end = replace(self._attempt(joined), asked=bool(self.asked))
            self._last = self._settled(end, time.monotonic() - began)
            if not self._last.again:
                if self._last.why and self.tries.most:
                    sys.stderr.write(f"mm: no restart: {self._last.why}\n")
                return self._last.code
            self._wait(self._last.seconds)

    def _joined(self) -> Nodes | Decision:
        if self._meeting is None:
            return self.nodes
        try:
            joined = self._meeting.join(self._last)
            self._last = self._meeting.last
            return joined
        except (TimeoutError, RuntimeError) as fault:
            raise not_started(fault, self.nodes) from fault

    def _attempt(self, nodes: Nodes) -> End:
        folder = Path(tempfile.mkdtemp(prefix="mm_core-"))
        launch_folder = LaunchFolder(folder, has_parent=True)
        launch_folder.open()
        try:
            with environment(folder, nodes.nproc, self._last.number):
                self.current = Attempt(nodes, self.command, launch_folder)
                self.current.killed = self._killed
                if self._meeting is None:
                    return self.current.work()
                with self._meeting.watching(lambda what: launch_folder.mark(LOST, what)):
                    return self.current.work()
        except MMError as fault:  # a host was lost before any rank had started
            if self._meeting is None or not self.tries.most:
                raise
            sys.stderr.write(f"mm: error: {fault.render()}\n")
            return End(PASSING, fault.what, own=False)
        finally:
            self._ran, self._waits = True, False
            self.current = None
            shutil.rmtree(folder, ignore_errors=True)

    def _settled(self, end: End, lasted: float) -> Decision:
        newest, most, last = self.tries.newest(), self.tries.most, self._last

        def decided(ends: Mapping[str, End | None]) -> Decision:
            return decide(ends, last, newest, lasted, most)

        hosts, records = ["this host"], True
        if self._meeting is None:
            decision = decided({hosts[0]: end})
        else:
            hosts = self._meeting.hosts
            try:
                decision, records = self._meeting.settle(end, decided)
            except RuntimeError:  # the rendezvous host is gone, and this one waits for it
                if end.code == STOPPED and not end.asked:  # its ranks stop when they lose their launcher
                    end = End(PASSING, f"lost the launcher at {self.nodes.endpoint}")
                decision, records = decided({hosts[0]: end}), self._meeting.records_alone
        if decision.again:
            if records:
                record(self.tries.folder, decision, hosts, lasted)
            since = f"step {decision.step}" if decision.step is not None else "the beginning"
            wait = f"in {decision.seconds:.0f} s, from {since}"
            sys.stderr.write(f"mm: restart {decision.number} of {most} {wait}: {decision.what}\n")
        return decision

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.asked:
                raise Asked
            time.sleep(0.1)

    # -- in the main thread --------------------------------------------------------------------

    def ask(self, given: signal.Signals) -> None:
        """Forwards a signal to every rank."""
        if not self.asked:
            self._asked_at = time.monotonic()
        self.asked.append(given)
        self.deliver()

    def kill(self) -> None:
        """Kills every rank at once (after a second Ctrl-C)."""
        self._killed = True
        if (current := self.current) is not None:
            current.killed = True
        self.deliver()

    def deliver(self) -> None:
        """Sends the signals to the ranks of the current attempt."""
        if (current := self.current) is not None:
            current.deliver(self.asked)

    def report_waiting(self) -> None:
        """Reports for whom the launcher waits, instead of minutes without output."""
        waits_for = self._meeting.waits_for if self._meeting is not None else ""
        if not waits_for:
            self._began = time.monotonic()
        elif waits_for != self._reported and time.monotonic() - self._began > WAITING:
            self._reported = waits_for
            sys.stderr.write(f"mm: waiting for {waits_for} (up to 15 minutes)\n")

    def abandoned(self) -> bool:
        """Whether a signal arrived before ranks ran, or a second Ctrl-C after them, and nothing ends."""
        current = self.current
        if not self.asked or (current is not None and current.started):
            return False
        if not self._waits:
            return self._killed and current is None and not self._over
        return self._killed or time.monotonic() - self._asked_at > UNSTARTED

    def outcome(self) -> int:
        """The exit code."""
        if isinstance(self.fault, Asked) or self.abandoned():
            if not self._ran:
                sys.stderr.write("mm: stopped before any rank had started\n")
                return 128 + self.asked[0]
            if self._killed:
                return 130
            sys.stderr.write("mm: stopped before a restart; the next start resumes\n")
            return STOPPED
        if self.fault is not None:
            raise self.fault
        return self.code


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


def launch(
    command: Sequence[str],
    nodes: Nodes,
    announce: bool = True,
    outlives_interrupts: bool = False,
    tries: Tries | None = None,
    last: Decision | None = None,
) -> int:
    """Launches a command as every rank of this host and returns the exit code of the launch.

    Args:
        command: program and arguments; the program calls `mm_core.runtime.launch.rank_process.run_as_rank`.
        nodes: how many ranks, and the rendezvous of the hosts.
        announce: report a received signal, and that the ranks save before they end.
        outlives_interrupts: forward a second Ctrl-C to the ranks instead of killing them.
        tries: how often the ranks start again after a failure that passes; None: never.
        last: the restart by which another launcher has started this one; None: this is the first start.

    Returns:
        0; 75 if the ranks saved and stopped on request; 130 after a second Ctrl-C; otherwise the code of the
        error, on whichever host it occurred: 69 if another try can succeed, 128 + signal number if a signal
        ended a rank.

    Raises:
        MMError: the ranks cannot be started.
    """
    quiet_torch()
    run = _Run(command, nodes, tries or Tries(), last)
    again = partial(run.ask, signal.SIGINT) if outlives_interrupts else run.kill
    thread = threading.Thread(target=run.work, name="elastic agent", daemon=True)
    logging.disable(logging.CRITICAL)  # the agent's own report of failures: the ranks' reports are better
    try:
        with StopFlag(announce=announce, on_signal=run.ask, on_second=again):
            thread.start()
            while thread.is_alive():
                thread.join(0.1)  # a join without a timeout would delay signal handlers
                run.deliver()
                run.report_waiting()
                if run.abandoned():
                    break
        ended = run.outcome()
        if ended:
            show_cursor("")  # a rank killed after another one had printed its error left it hidden
        return ended
    finally:
        logging.disable(logging.NOTSET)
        if run.current is not None and run.current.folder.path is not None:
            shutil.rmtree(run.current.folder.path, ignore_errors=True)
