"""Measuring many rows: by all ranks, each by as many processes as its share of the machine's cores."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from mm_core.contracts import Randomness, generators_kept, seed_generators
from mm_core.data import (
    StartWorker,
    check_stop,
    deaths_explained,
    start_server,
    starting,
    starts_explained,
)
from mm_core.errors import DataError
from mm_internvl.data.rows import RawRow

T = TypeVar("T")

Measured = int | DataError
"""Tokens of a row, or why it cannot be read."""

CHUNK = 100
"""Rows that a process measures before it answers, and a rank before it looks whether it is to stop."""

ALONE = 20_000
"""Rows that are not worth the start of processes: half a minute's work."""

MOST = 16
"""Processes of a rank: each holds a tokenizer and what opens it."""

SECONDS = 10.0
"""Between two lines about how far measuring is."""

_logger = logging.getLogger(__name__)


def lengths_of(rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> Tensor:
    """[N] int64: what `measure` finds of each row, and 0 for rows of which it raises DataError. Of several
    ranks, each measures its share, and all return the same: called by all of them.

    Raises:
        DataError: where it does so for every row; of the first.
        StopRequested: where the run was asked to stop; nothing is kept.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # By turns: rows that take long stand together, in a file of their own.
    own = range(rank, len(rows), world)
    lengths, first, place = torch.zeros(len(own), dtype=torch.int64), None, 0
    with closing(measured(rows, measure, own)) as chunks:
        parts = _told(chunks, len(own), rank, world)
        for _ in range(math.ceil(len(rows) / (world * CHUNK))):  # as many on every rank
            check_stop()
            for one in next(parts, []):
                if isinstance(one, DataError):
                    first = first or (own[place], one)
                else:
                    lengths[place] = one
                place += 1
    everyone = gathered((lengths, first))
    found = torch.zeros(len(rows), dtype=torch.int64)
    for number, (part, _) in enumerate(everyone):
        found[number::world] = part
    faults = [failed for _, failed in everyone if failed is not None]
    if faults and not found.any():
        _, fault = min(faults, key=lambda failed: failed[0])
        raise DataError(
            f"none of {len(rows)} conversations can be read; the first: {fault.what}", where=fault.where
        ) from fault
    return found


def gathered(item: T) -> list[T]:
    """`item` of every rank, on every rank; alone, its own."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [item]
    items = [item] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def _told(parts: Iterator[list[Measured]], count: int, rank: int, world: int) -> Iterator[list[Measured]]:
    """The same; the first rank says now and then how far it is."""
    begun = said = time.monotonic()
    share, done = "" if world == 1 else f" (a share of 1/{world})", 0
    for part in parts:
        done, now = done + len(part), time.monotonic()
        if rank == 0 and now - said >= SECONDS:
            said = now
            # Of lesser levels nothing is shown where nobody has set logging up.
            _logger.warning(
                "conversations are measured: %d of %d%s in %.0f s", done, count, share, now - begun
            )
        yield part


def measured(
    rows: Sequence[RawRow], measure: Callable[[RawRow], int], numbers: range
) -> Generator[list[Measured]]:
    """What `measure` finds of rows by their numbers, in that order, `CHUNK` at a time. Other errors than
    DataError end it."""
    chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    asked, count = _Rows(rows, measure), min(_processes(), len(chunks))
    if len(numbers) <= ALONE or count == 1:
        for chunk in chunks:
            yield asked[chunk]
        return
    # The training's own readers will be of the same server.
    modules = ["mm_core.data.loading.loader", __name__, type(getattr(measure, "__self__", rows)).__module__]
    loader: DataLoader[list[Measured]] = DataLoader(
        asked,
        batch_size=None,
        sampler=chunks,
        num_workers=count,
        collate_fn=_unchanged,
        worker_init_fn=StartWorker(),
        multiprocessing_context=start_server(modules),
        generator=torch.Generator().manual_seed(0),  # torch's own draw must not move the global one
    )
    with starting(), starts_explained():
        reading = iter(loader)
    with deaths_explained(reading):
        yield from reading


class _Rows(TorchDataset[list[Measured]]):
    def __init__(self, rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> None:
        self.rows, self.measure = rows, measure

    def __getitem__(self, numbers: range) -> list[Measured]:
        with generators_kept():
            return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Measured:
        seed_generators(Randomness(0).at("measure", number))  # the same whichever process measures it
        try:
            return self.measure(self.rows[number])
        except DataError as fault:
            return fault


def _processes() -> int:
    """Cores of this rank: those that it may use, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _unchanged(item: T) -> T:
    return item
