"""Requests to stop: a signal is noted, and acted upon at the end of the step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

STOPPED = 75
"""Exit code of a run that saved and ended on request before its last step (EX_TEMPFAIL: try again)."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and end. SIGUSR1 is the warning that SLURM is told to send."""

REPEAT = 1.0
"""Seconds within which a second SIGINT is the echo of the first: terminal and launcher both send one."""


class StopFlag:
    """`with StopFlag() as stop:` notes SIGTERM, SIGINT, SIGUSR1 and SIGHUP in `stop.requested`.

    A second SIGINT leaves at once, without saving. A signal that was ignored before (`nohup`, a
    shell's background job) stays ignored. Outside of the main thread, where Python can not set
    handlers, nothing is noted. The handlers of before return with the end of the block.

    Args:
        announce: say on stderr that the signal was heard.
        on_signal: called with each signal that is noted, in the handler.
        on_second: what a second SIGINT does; by default it ends the process with 130.
    """

    def __init__(
        self,
        *,
        announce: bool = False,
        on_signal: Callable[[signal.Signals], None] | None = None,
        on_second: Callable[[], None] | None = None,
    ) -> None:
        self.requested: str | None = None
        self._announce, self._on_signal, self._on_second = announce, on_signal, on_second or leave_at_once
        self._interrupted: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        given, now = signal.Signals(number), time.monotonic()
        if given is signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted > REPEAT:
                self._on_second()
                return
        if self.requested is None:
            self.requested = given.name
            if self._announce:
                _say(f"mm: {given.name}: saves after this step and ends", given is signal.SIGINT)
        if self._on_signal is not None:
            self._on_signal(given)


def _say(text: str, interrupted: bool) -> None:
    # os.write, because a handler may interrupt a print, whose buffer must not be entered twice.
    once_more = "; Ctrl-C once more leaves at once, without saving" if interrupted else ""
    os.write(2, f"{text}{once_more}\n".encode())


def show_cursor(then: str = "\n") -> None:
    """Gives a terminal its cursor back: a live progress bar that is cut off leaves it hidden. `then` is
    written after that: what follows is not to stand in the bar's line."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, f"\x1b[?25h{then}".encode())
            return


def leave_at_once() -> None:
    """Ends the process and its data workers, saving nothing."""
    for child in multiprocessing.active_children():
        child.kill()
    show_cursor()
    os._exit(130)
