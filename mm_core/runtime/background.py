"""A background thread that runs work in order and keeps the first error until it is checked."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mm_core.errors import MMError
from mm_core.runtime.ranks import explain


class BackgroundQueue:
    """A background thread that runs work in order, such as saving checkpoints; it starts with the first work.

    All work is run, even after an error: ranks communicate while they save a checkpoint, and a rank that
    skipped its part would leave the others waiting. `fault` is the first error.

    Args:
        name: the thread's name.
        doing: what the work does, for the message of an error that is not an MMError.
        backlog: how much work may wait; 0 for any amount.
    """

    def __init__(self, name: str, doing: str, backlog: int = 0) -> None:
        self.fault: BaseException | None = None
        self._name, self._doing = name, doing
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue(backlog)
        self._thread: threading.Thread | None = None

    def give(self, work: Callable[[], object]) -> None:
        """Adds work to the background thread; queue.Full if the backlog is used up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put_nowait(work)

    def record(self, fault: BaseException) -> None:
        """Keeps an error of the background thread, if it is the first, until `check`."""
        self.fault = self.fault or fault

    def check(self) -> None:
        """Raises the first error of the background thread since the last check, as an MMError."""
        fault, self.fault = self.fault, None
        if isinstance(fault, MMError):
            raise fault
        if fault is not None:
            raise explain(self._doing, fault) from fault

    def finish(self, timeout: float | None = None) -> int:
        """Waits until the background thread has done all its work, and ends it; returns 0.

        After `timeout` seconds, returns how many entries of the queue (its end mark included) are left. The
        thread then ends by itself, or with the process.
        """
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
            except BaseException as fault:  # kept for the thread that calls `check`
                self.record(fault)
