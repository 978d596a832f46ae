"""A progress bar in bytes for reading and writing weights, shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(title: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar for reading or writing weights; yields a function that adds bytes to it.

    Args:
        title: text beside the bar.
        total: bytes in all.
        shown: false on all ranks but the first; a log file gets no bar either.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
