"""One thread that does one thing after another, and keeps the first fault until somebody asks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mm_core.errors import MMError
from mm_core.runtime.ranks import explain


class BackgroundQueue:
    """Runs work in the order it was given, in a thread that starts with the first.

    All of it is run, also after a fault: ranks speak with each other in a checkpoint's, and one that left its
    part out would keep the others waiting. `fault` is the first.

    Args:
        name: the thread's.
        doing: what the work is, in the sentence for a fault that has none of its own.
        backlog: work that may wait; 0: any amount.
    """

    def __init__(self, name: str, doing: str, backlog: int = 0) -> None:
        self.fault: BaseException | None = None
        self._name, self._doing = name, doing
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue(backlog)
        self._thread: threading.Thread | None = None

    def give(self, work: Callable[[], object]) -> None:
        """Adds work. queue.Full where the backlog is used up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put_nowait(work)

    def record(self, fault: BaseException) -> None:
        """Keeps a fault, if it is the first, until `check`."""
        self.fault = self.fault or fault

    def check(self) -> None:
        """Raises the fault of work done since the last check: an MMError, which ranks can tell each other."""
        fault, self.fault = self.fault, None
        if isinstance(fault, MMError):
            raise fault
        if fault is not None:
            raise explain(self._doing, fault) from fault

    def finish(self, timeout: float | None = None) -> int:
        """Waits until everything given is done, and ends the thread: 0. After `timeout` seconds it is left to
        end by itself, or with the process: how much then waits, the end itself included."""
        thread, self._thread = self._thread, None
        if thread is None:
            return 0
        ends = None if timeout is None else time.monotonic() + timeout
        with suppress(queue.Full):
            self._work.put(None, timeout=timeout)
        thread.join(None if ends is None else max(0.0, ends - time.monotonic()))
        return self._work.qsize() if thread.is_alive() else 0

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as fault:  # kept for the thread that asks
                self.record(fault)
