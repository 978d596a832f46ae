"""Signals that ask a run to stop: a signal is recorded, and handled at the end of the step."""

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

PASSING = 69
"""Exit code of a run that lost a rank, host, device or connection (EX_UNAVAILABLE): the same command goes on
from the newest checkpoint."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and end. SIGUSR1 is the warning that SLURM can be set to send."""

REPEAT = 1.0
"""Seconds within which a second SIGINT counts as the first: terminal and launcher both send one."""


REASONS: dict[signal.Signals, str] = {}
"""What `StopFlag` records in the place of a signal that this process has sent itself."""

_noted: list[signal.Signals] = []
"""What the last `StopFlag` of this process has recorded."""


class StopFlag:
    """Records signals that ask a run to stop (SIGTERM, SIGINT, SIGUSR1, SIGHUP) in `requested`.

    Used as `with StopFlag() as stop:`. A second SIGINT ends the process at once, without saving. A signal
    that was ignored before (`nohup`, a shell's background job) stays ignored. Outside the main thread, where
    Python cannot set handlers, nothing is recorded. The previous handlers are restored at the end of the
    block.

    Args:
        announce: report a received signal on stderr.
        on_signal: called with each recorded signal, in the handler.
        on_second: called at a second SIGINT; by default the process ends with code 130.
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
            _noted.clear()
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        given, now = signal.Signals(number), time.monotonic()
        _noted.append(given)
        if given is signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted > REPEAT:
                self._on_second()
                return
        if self.requested is None:
            self.requested = REASONS.get(given, given.name)
            if self._announce:
                _print(
                    f"mm: {given.name} received: saving after this step, then stopping",
                    given is signal.SIGINT,
                )
        if self._on_signal is not None:
            self._on_signal(given)


@contextmanager
def leaving_at_signals(waits_for: str, patience: float, noted: bool = False) -> Iterator[None]:
    """Ends the process with code 75 if a signal asks a rank to stop while it waits for other ranks.

    Python runs no signal handler while native code waits. There is nothing to save in the block.

    Args:
        waits_for: what the block does, for the message: "waiting for ...".
        patience: seconds that the block may continue after the signal.
        noted: a signal that was recorded before the block counts too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()

    def listen() -> None:
        while numbers := os.read(reader, 1):  # until it is closed: Python warns of a signal without a reader
            if numbers[0] in SIGNALS and not over.wait(patience):
                _leave_waiting(signal.Signals(numbers[0]), waits_for)
        os.close(reader)

    threading.Thread(target=listen, name="mm_core signals", daemon=True).start()
    if noted and _noted:
        os.write(writer, bytes([_noted[0]]))
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def _leave_waiting(given: signal.Signals, waits_for: str) -> NoReturn:
    folder = LaunchFolder.current()
    if folder.mark(STOPPED_EARLY):  # of several ranks on this host one prints it
        with suppress(OSError):  # whoever read it may be gone, and this thread must end the process
            os.write(2, f"mm: {given.name} received: stopped while {waits_for}; nothing was lost\n".encode())
    end_workers()
    if signal.getsignal(given) is signal.default_int_handler:
        os._exit(130)  # signals are not recorded in this process
    # torch's agent treats any code except 0 as a failure.
    os._exit(0 if folder.launched else STOPPED)


def _print(text: str, interrupted: bool) -> None:
    # os.write, because a handler may interrupt a print, whose buffer must not be entered twice.
    once_more = "; press Ctrl-C again to stop at once, without saving" if interrupted else ""
    with suppress(OSError):  # stderr may be closed, which must not end the process here
        os.write(2, f"{text}{once_more}\n".encode())


def show_cursor(then: str = "\n") -> None:
    """Shows the terminal's cursor again, which an interrupted progress bar leaves hidden.

    Args:
        then: written afterwards, so that further output does not continue the bar's line.
    """
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            with suppress(OSError):
                os.write(descriptor, f"\x1b[?25h{then}".encode())
            return


def leave_at_once() -> None:
    """Ends this rank's process and its data workers at once, without saving (exit code 130)."""
    end_workers()
    show_cursor()
    os._exit(130)
