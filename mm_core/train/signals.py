"""Requests to stop: a signal is noted, and acted upon at the end of the step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

STOPPED = 75
"""Exit code of a run that saved and ended on request before its last step (EX_TEMPFAIL: try again)."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """`with StopFlag() as stop:` notes SIGTERM, SIGINT and SIGUSR1 (SLURM's warning) in `stop.requested`.

    A second SIGINT leaves at once, without saving. Outside of the main thread, where Python can not
    set handlers, it notes nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested == "SIGINT" and number == signal.SIGINT:
            os._exit(130)
        self.requested = signal.Signals(number).name
