"""Running code of plugins: what it raises to end the process ends that code only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class ForeignExit(Exception):
    """Code of a plugin raised SystemExit, KeyboardInterrupt or another BaseException: its `__cause__`."""


@contextmanager
def foreign_code() -> Iterator[None]:
    """Turns what is no Exception into ForeignExit, but for the KeyboardInterrupt of a person's Ctrl-C.

    `sys.exit(0)` in a module would otherwise be a success of the command that imports it.
    """
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    handled = callable(before) and threading.current_thread() is threading.main_thread()

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if callable(before):
            before(number, frame)

    if handled:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if asked:
            raise
        raise ForeignExit(f"{type(error).__name__}: {error}") from error
    finally:
        if handled and signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)
