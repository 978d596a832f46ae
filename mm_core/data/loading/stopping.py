"""Requests to stop, checked during long work before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mm_core.runtime.ranks import on_any_rank


class StopRequested(Exception):
    """Long work was abandoned on all ranks because a stop was requested. Not an error: it ends the run."""


_asked: ContextVar[Callable[[], bool] | None] = ContextVar("mm_core_stop_asked", default=None)


@contextmanager
def stop_on(asked: Callable[[], bool]) -> Iterator[None]:
    """A context in which `check_stop` calls `asked` to learn whether this rank should stop."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def check_stop() -> None:
    """Ends long work of a dataset (opening, measuring) if a stop was requested; call it every few seconds.

    A collective call: all ranks must call it equally often, and a signal to one rank is enough. Outside of a
    run it does nothing.

    Raises:
        StopRequested: on every rank, if a stop was requested on any of them.
    """
    asked = _asked.get()
    if asked is None:
        return
    if on_any_rank(asked()):
        raise StopRequested
