"""One thread that does one thing after another, and keeps the first fault until somebody asks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mm_core.errors import MMError
from mm_core.runtime.ranks import explain


class WriterThread:
    """Runs work in the order it was given, in a thread that starts with the first.

    All of it is run, also after a fault: ranks speak with each other in it, and one that left its part out
    would keep the others waiting. `check` raises the first fault.

    Args:
        name: the thread's.
        doing: what the work is, in the sentence for a fault that has none of its own.
    """

    def __init__(self, name: str, doing: str) -> None:
        self._name, self._doing = name, doing
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fault: MMError | None = None

    def give(self, work: Callable[[], None]) -> None:
        """Adds work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)

    def record(self, fault: BaseException) -> None:
        """Keeps a fault, if it is the first, until `check`."""
        if self._fault is None:
            said = fault if isinstance(fault, MMError) else explain(self._doing, fault)
            if said is not fault:
                said.__cause__ = fault
            self._fault = said

    def check(self) -> None:
        """Raises the fault of work done since the last check: an MMError, which ranks can tell each other."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def finish(self, timeout: float | None = None) -> None:
        """Waits until everything given is done, and ends the thread; after `timeout` seconds it is left to
        end by itself, or with the process."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as fault:  # kept for the thread that asks
                self.record(fault)
