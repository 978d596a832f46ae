"""How long a data worker may decode one file: the system ends a worker whose decoder hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from mm_core.errors import DataError

_limit: ContextVar[DecodeLimit | None] = ContextVar("mm_core_decode_limit", default=None)


class DecoderHungError(DataError):
    """The decoder of a file did not end in time."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(
            f"the decoder did not end within {seconds:g} s",
            where=name,
            hint="encode the file again, or remove it from the data; on a slow machine or disk, raise"
            " data.decode_seconds",
        )


class DecodeLimit:
    """The seconds that the decoder of one file may take in a data worker, and the files that took longer.

    A timer of the system ends the worker: no code of a process runs while a decoder is in one call of C.

    Args:
        seconds: for one file.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.hung: set[str] = set()
        self._note = -1  # file descriptor
        self._running = False

    def hold(self, folder: Path) -> None:
        """Applies the limit to the files that this process decodes in this thread.

        Args:
            folder: where it notes the file that it decodes.
        """
        with suppress(OSError):  # the training process may be gone, and its folder with it
            self._note = os.open(_note(folder, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            _limit.set(self)

    def take(self, folder: Path, process: int) -> str | None:
        """The file at which the limit ended a process; from now on it cannot be read."""
        try:
            name = os.fsdecode(_note(folder, process).read_bytes().partition(b"\0")[0])
        except OSError:
            return None
        self.hung.add(name)
        return name

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """A context in which the timer runs. DecoderHungError if the file has ended a worker."""
        if self._running:  # a reader that opens a picture
            yield
            return
        if name in self.hung:
            raise DecoderHungError(name, self.seconds)
        os.pwrite(self._note, os.fsencode(name) + b"\0", 0)
        self._running = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._running = False


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """A context in which a file is decoded: in a data worker for `data.decode_seconds` at most.

    Args:
        name: of the file, as `skipped.jsonl` lists it.

    Raises:
        DecoderHungError: it has ended a worker before.
    """
    limit = _limit.get()
    if limit is None:
        yield
        return
    with limit.over(name):
        yield


def _note(folder: Path, process: int) -> Path:
    return folder / f"decoding_{process}"
