"""The standard streams of a command: whether what cannot be written ends it, and how."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mm_core.errors import MMError


class BestEffort(io.TextIOBase):
    """A stream whose loss ends nothing: a run is as good without a reader, and its log files have the lines.

    Once a write has failed (a pipe whose reader left, a full disk), the stream's descriptor leads nowhere, so
    that neither children nor the interpreter's last flush fail by it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes the text, or loses it (`Required`: or raises). Characters that the stream's encoding lacks
        are written as escapes."""
        try:
            self._try(self.stream.write, text)
        except UnicodeError:
            encoding = self.encoding or "ascii"
            self._try(self.stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Writes what is held, or loses it."""
        self._try(self.stream.flush)

    def _try(self, act: Any, *given: str) -> Any:
        try:
            return act(*given)
        except UnicodeError:  # a ValueError too: the stream is as good as before
            raise
        except BlockingIOError:  # a terminal that is slow takes the next one
            return None
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.lose()
            return None

    def lose(self) -> None:
        """Has the stream lead nowhere from here on."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()  # what it still holds

    # `TextIOBase` has these, as None: they would hide the stream's.
    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self.stream.encoding)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        found: str | None = self.stream.errors
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        """As the stream."""
        return bool(self.stream.isatty())

    def fileno(self) -> int:
        """As the stream."""
        return int(self.stream.fileno())

    def writable(self) -> bool:
        """Always."""
        return True


class Required(BestEffort):
    """The stream of a command whose output is what it was asked for: what cannot be written is an error.

    A reader that has seen enough (`mm weights ... | head`) is a BrokenPipeError: the command ends quietly.
    """

    def _try(self, act: Any, *given: str) -> Any:
        try:
            return act(*given)
        except BrokenPipeError:
            self.lose()
            raise
        except OSError as fault:
            self.lose()
            raise MMError(
                f"the output cannot be written: {fault.strerror}",
                where="standard output",
                hint="free space where it is redirected to, or redirect it elsewhere",
            ) from None


@contextmanager
def standard_streams(*, required: bool) -> Iterator[None]:
    """Standard output and error of a command; `required` is whether its output is what it was asked for."""
    _open_closed()
    before = sys.stdout, sys.stderr
    out = Required(sys.stdout) if required else BestEffort(sys.stdout)
    sys.stdout, sys.stderr = out, BestEffort(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Has streams that were closed (`>&-`) lead nowhere: the next file that is opened would take the
    number, and be written to by whatever writes to standard output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False))
