"""Measuring many rows: by as many processes as this rank's share of the machine's cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from mm_core.data.workers import StartWorker, deaths_explained, signals_held, start_server
from mm_core.errors import DataError
from mm_internvl.rows import RawRow

Measured = int | DataError
"""Tokens of a row, or why it can not be read."""

CHUNK = 500
"""Rows that a process measures before it answers."""

ALONE = 20_000
"""Rows that are not worth the start of processes: half a minute's work."""


MOST = 16
"""Processes of a rank: each holds a tokenizer and what opens it."""


def measured(rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> Iterator[Measured]:
    """What `measure` finds of each row, in their order. Other errors than DataError end it."""
    chunks = [range(first, min(first + CHUNK, len(rows))) for first in range(0, len(rows), CHUNK)]
    asked, count = _Rows(rows, measure), min(_processes(), len(chunks))
    if len(rows) <= ALONE or count == 1:
        for chunk in chunks:
            yield from asked[chunk]
        return
    # The training's own readers will be of the same server.
    modules = ["mm_core.data.loader", __name__, type(getattr(measure, "__self__", rows)).__module__]
    loader: DataLoader[Any] = DataLoader(
        asked,
        batch_size=None,
        sampler=chunks,
        num_workers=count,
        collate_fn=_unchanged,
        worker_init_fn=StartWorker(),
        multiprocessing_context=start_server(modules),
        generator=torch.Generator().manual_seed(0),  # torch's own draw must not move the global one
    )
    with signals_held():
        reading = iter(loader)
    with deaths_explained(reading):
        for part in reading:
            yield from part


class _Rows(TorchDataset[list[Measured]]):
    def __init__(self, rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> None:
        self.rows, self.measure = rows, measure

    def __getitem__(self, numbers: range) -> list[Measured]:
        return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Measured:
        try:
            return self.measure(self.rows[number])
        except DataError as fault:
            return fault


def _processes() -> int:
    """Cores of this rank: those that it may use, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _unchanged(item: Any) -> Any:
    return item
