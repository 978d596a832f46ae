"""Counts tokens of many rows: on all ranks, each with as many processes as its share of the CPU cores."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from mm_core.contracts import Randomness, generators_kept, seed_generators
from mm_core.data.loading.stopping import check_stop
from mm_core.data.loading.workers import StartWorker, read_by_workers, start_server
from mm_core.errors import DataError, plural
from mm_core.processes import usable_cores
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.conversations.rows.reading import RawRow

T = TypeVar("T")

Count = tuple[int, int]
"""Tokens of a row, and how many of them are those of images."""

Measured = Count | DataError
"""Counts of a row, or the error of an unreadable one."""

CHUNK = 100
"""Rows per result of a process, and per check of a rank for a stop request."""

ALONE = 20_000
"""Largest number of rows for which no processes are started: about half a minute of work."""

MOST = 16
"""Largest number of processes per rank: each opens its own tokenizer."""

SECONDS = 10.0
"""Seconds between two progress lines."""

_logger = logging.getLogger(__name__)


def lengths_of(rows: Sequence[RawRow], measure: Callable[[RawRow], Count]) -> Tensor:
    """Counts the tokens of rows of conversations, on all ranks. Each rank measures its share, and all return
    the same result; all ranks call it.

    Args:
        rows: the rows.
        measure: returns the counts of a row.

    Returns:
        Counts [N,2] int64; 0 for a row for which `measure` raises DataError.

    Raises:
        DataError: `measure` raises it for every row; the first one.
        StopRequested: a stop of the run was requested; nothing is stored.
    """
    ranks = Ranks.current()
    # Ranks take rows in turn: slow rows are often neighbours, from one file.
    own, world = ranks.share(len(rows)), ranks.count
    lengths, first, place = torch.zeros(len(own), 2, dtype=torch.int64), None, 0
    with closing(measured(rows, measure, own)) as chunks:
        parts = _with_progress(chunks, len(own), ranks.rank == 0, world)
        for _ in range(math.ceil(len(rows) / (world * CHUNK))):  # the same number on every rank
            check_stop()
            for one in next(parts, []):
                if isinstance(one, DataError):
                    first = first or (own[place], one)
                else:
                    lengths[place] = torch.tensor(one)
                place += 1
    everyone = ranks.gather((lengths, first))
    found = torch.zeros(len(rows), 2, dtype=torch.int64)
    for number, (part, _) in enumerate(everyone):
        found[number::world] = part
    faults = [failed for _, failed in everyone if failed is not None]
    if faults and not found.any():
        _, fault = min(faults, key=lambda failed: failed[0])
        raise DataError(
            f"none of {plural(len(rows), 'conversation')} can be read; error of the first: {fault.what}",
            where=fault.where,
            accepted=fault.accepted,
            hint=fault.hint or "correct the rows, or the paths of their images and videos",
        ) from fault
    return found


def _with_progress(
    parts: Iterator[list[Measured]], count: int, shown: bool, world: int
) -> Iterator[list[Measured]]:
    """Yields the parts unchanged, and logs the progress from time to time if it is shown."""
    begun = reported = time.monotonic()
    share, done = "" if world == 1 else f" (a share of 1/{world})", 0
    for part in parts:
        done, now = done + len(part), time.monotonic()
        if shown and now - reported >= SECONDS:
            reported = now
            # Without any setup of logging, Python shows no level below warning.
            _logger.warning(
                "counting tokens of conversations: %d of %d%s in %.0f s", done, count, share, now - begun
            )
        yield part


def measured(
    rows: Sequence[RawRow], measure: Callable[[RawRow], Count], numbers: range
) -> Generator[list[Measured]]:
    """Counts tokens of conversations with several processes; yields `CHUNK` results at a time, in order.

    Args:
        rows: the rows.
        measure: returns the counts of a row. Any error except DataError ends the measurement.
        numbers: numbers of the rows to measure.
    """
    chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    asked, count = _Rows(rows, measure), min(_processes(), len(chunks))
    if len(numbers) <= ALONE or count == 1:
        for chunk in chunks:
            yield asked[chunk]
        return
    # The data workers of training will use the same server.
    modules = ["mm_core.data.loading.loader", __name__, type(getattr(measure, "__self__", rows)).__module__]
    loader: DataLoader[list[Measured]] = DataLoader(
        asked,
        batch_size=None,
        sampler=chunks,
        num_workers=count,
        collate_fn=_unchanged,
        worker_init_fn=StartWorker(),
        multiprocessing_context=start_server(modules),
        generator=torch.Generator().manual_seed(0),  # the loader's draw must not change the global generator
    )
    yield from read_by_workers(loader, asked)


class _Rows(TorchDataset[list[Measured]]):
    def __init__(self, rows: Sequence[RawRow], measure: Callable[[RawRow], Count]) -> None:
        self.rows, self.measure = rows, measure

    def __getitem__(self, numbers: range) -> list[Measured]:
        with generators_kept():
            return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Measured:
        seed_generators(Randomness(0).at("measure", number))  # the same in every process
        try:
            return self.measure(self.rows[number])
        except DataError as fault:
            return fault


def _processes() -> int:
    """Number of processes for this rank: its share of the available CPU cores, up to MOST."""
    cores = usable_cores()
    return min(MOST, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _unchanged(item: T) -> T:
    return item
