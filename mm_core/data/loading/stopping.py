"""A request to stop, as work that comes before the first step hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mm_core.runtime.ranks import on_any_rank


class StopRequested(Exception):
    """Long work was left, on all ranks, because the run was asked to stop. No fault: the run ends by it."""


_asked: ContextVar[Callable[[], bool] | None] = ContextVar("mm_core_stop_asked", default=None)


@contextmanager
def stop_on(asked: Callable[[], bool]) -> Iterator[None]:
    """In the block, `check_stop` asks `asked` whether this rank has been told to stop."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def check_stop() -> None:
    """What takes longer than some seconds when a dataset is opened or measures calls this now and then.

    Of several ranks, all call it equally often: they agree, and a signal to one is enough. Outside of a run
    it does nothing.

    Raises:
        StopRequested: on every rank, where any of them was told to stop.
    """
    asked = _asked.get()
    if asked is None:
        return
    if on_any_rank(asked()):
        raise StopRequested
