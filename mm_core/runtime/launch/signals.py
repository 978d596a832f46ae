"""Requests to stop: a signal is noted, and acted upon at the end of the step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from mm_core.runtime.launch.launch_folder import STOPPED_EARLY, LaunchFolder
from mm_core.runtime.leftovers import end_workers

STOPPED = 75
"""Exit code of a run that saved and ended on request before its last step (EX_TEMPFAIL: try again)."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and end. SIGUSR1 is the warning that SLURM is told to send."""

REPEAT = 1.0
"""Seconds within which a second SIGINT is the echo of the first: terminal and launcher both send one."""


class StopFlag:
    """`with StopFlag() as stop:` notes SIGTERM, SIGINT, SIGUSR1 and SIGHUP in `stop.requested`.

    A second SIGINT leaves at once, without saving. A signal that was ignored before (`nohup`, a
    shell's background job) stays ignored. Outside of the main thread, where Python cannot set
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


@contextmanager
def leaving_at_signals(waits_for: str, patience: float = 0.0) -> Iterator[None]:
    """Where a rank waits for others, Python calls no handler: a signal that asks to stop ends the process,
    with 75, once the block has gone on for `patience` seconds more. There is nothing to save in it.

    Args:
        waits_for: what the block does, for the sentence.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, speaks = os.pipe()
    os.set_blocking(speaks, False)
    before = signal.set_wakeup_fd(speaks, warn_on_full_buffer=False)
    over = threading.Event()

    def listen() -> None:
        while numbers := os.read(heard, 1):  # to the end: Python tells of a signal that finds no reader
            if numbers[0] in SIGNALS and not over.wait(patience):
                _leave_waiting(signal.Signals(numbers[0]), waits_for)
        os.close(heard)

    threading.Thread(target=listen, name="mm_core signals", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(speaks)


def _leave_waiting(given: signal.Signals, waits_for: str) -> NoReturn:
    folder = LaunchFolder.current()
    if folder.mark(STOPPED_EARLY):  # of several ranks on this host one speaks
        os.write(2, f"mm: {given.name}: stopped while it {waits_for}; nothing was lost\n".encode())
    end_workers()
    if signal.getsignal(given) is signal.default_int_handler:
        os._exit(130)  # nobody asked for signals to be noted
    # torch's agent takes any code but 0 for a failure.
    os._exit(0 if folder.launched else STOPPED)


def _say(text: str, interrupted: bool) -> None:
    # os.write, because a handler may interrupt a print, whose buffer must not be entered twice.
    once_more = "; Ctrl-C once more leaves at once, without saving" if interrupted else ""
    with suppress(OSError):  # nobody may read it: no reason to end by the signal
        os.write(2, f"{text}{once_more}\n".encode())


def show_cursor(then: str = "\n") -> None:
    """Gives a terminal its cursor back: a live progress bar that is cut off leaves it hidden. `then` is
    written after that: what follows is not to stand in the bar's line."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            with suppress(OSError):
                os.write(descriptor, f"\x1b[?25h{then}".encode())
            return


def leave_at_once() -> None:
    """Ends the process and its data workers, saving nothing."""
    end_workers()
    show_cursor()
    os._exit(130)
