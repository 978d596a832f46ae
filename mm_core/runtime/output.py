"""The standard streams of a command: whether output that cannot be written ends the command, and how."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mm_core.errors import MMError, without_controls


class BestEffort(io.TextIOBase):
    """A standard stream whose failure does not end the run, since the log files contain the same lines.

    Once a write has failed (a closed pipe, a full disk), the stream's descriptor is redirected to /dev/null,
    so that neither child processes nor the interpreter's last flush fail.

    Args:
        stream: the stream.
        live: control characters are written as they are, for a progress bar; otherwise as escapes, so that
            no name in a file commands the terminal.
    """

    def __init__(self, stream: Any, live: bool = True) -> None:
        self.stream, self._live = stream, live

    def write(self, text: str) -> int:
        """Writes text to the standard stream; text that cannot be written is dropped (`Required`: an error).

        Characters that the stream's encoding lacks are written as escapes.
        """
        shown = text if self._live else without_controls(text)
        try:
            self._try(self.stream.write, shown)
        except UnicodeError:
            encoding = self.encoding or "ascii"
            self._try(self.stream.write, shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the standard stream; text that cannot be written is dropped (`Required`: an error)."""
        self._try(self.stream.flush)

    def _try(self, act: Any, *given: str) -> Any:
        try:
            return act(*given)
        except UnicodeError:  # also a ValueError, but the stream still works
            raise
        except BlockingIOError:  # a slow terminal: the next write may succeed
            return None
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.lose()
            return None

    def lose(self) -> None:
        """Redirects the failed standard stream to /dev/null from here on."""
        with suppress(OSError, ValueError):
            own = self.stream.fileno()  # fails for a closed stream
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, own)
            os.close(nowhere)
            self.stream.flush()  # the buffered text

    # `TextIOBase` has these as None, which would hide the stream's values.
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
        return bool(self.stream.isatty())

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def writable(self) -> bool:

        return True


class Required(BestEffort):
    """A standard stream whose output is the purpose of the command: a failed write is an error.

    A reader that closes the pipe (`mm weights ... | head`) raises BrokenPipeError: the command ends silently.
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
                hint="free disk space where the output is redirected to, or redirect it elsewhere",
            ) from None


class Aside(BestEffort):
    """Standard output of a command that prints one JSON document: everything else that is printed, such as by
    plugins as they are imported, goes to standard error.

    Attributes:
        document: the stream for the document.
    """

    def __init__(self, document: Any) -> None:
        super().__init__(sys.stderr)
        self.document = document


@contextmanager
def standard_streams(*, required: bool, live: bool = False) -> Iterator[None]:
    """Replaces standard output and standard error for the duration of a command.

    Args:
        required: output that cannot be written is an error, since the output is the command's purpose.
        live: a progress bar may be drawn on standard output.
    """
    _open_closed(required)
    before = sys.stdout, sys.stderr
    out = (Required if required else BestEffort)(sys.stdout, live)
    sys.stdout, sys.stderr = out, BestEffort(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed(required: bool) -> None:
    """Redirects closed streams (`>&-`) to /dev/null: otherwise the next opened file would get the descriptor
    number, and everything written to standard output would go into that file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Output that is required and has nowhere to go is an error: read-only, its first write fails.
            os.open(
                os.devnull, os.O_RDONLY if required and number == 1 else os.O_RDWR
            )  # gets the lowest free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False))
