"""Reading the rows that a build of the feature cache encodes, in data workers."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset as TorchDataset

from mm_core.contracts import Batch, Randomness, SampleKey, generators_kept
from mm_core.data.cache.rows import CacheRows
from mm_core.data.loading.loader import AuthorCode, CodeError, Fault
from mm_core.errors import CacheError, DataError


class Wanted(NamedTuple):
    """Rows of a split to read: (number among the items, row, variant) of each."""

    chunk: str
    split: int
    items: list[tuple[int, int, int]]


class Read(NamedTuple):
    """What there is to encode: batches of equal samples, or texts, with their numbers.

    Attributes:
        chunk: as wanted.
        batches: with the numbers of their samples.
        faults: numbers of bad rows, the reason, and whether it may pass: the content is not known to be bad.
    """

    chunk: str
    batches: list[tuple[Batch | list[str], list[int]]]
    faults: list[tuple[int, str, bool]]


class Reading(TorchDataset[Any]):
    """The work of a data worker: rows -> samples -> batches."""

    def __init__(self, rows: Sequence[CacheRows], seed: int) -> None:
        # In a worker, the code comes first: it imports the one-file plugins that the rows are made of.
        self._splits = [(AuthorCode(own.dataset, None, Randomness(seed)), own) for own in rows]

    def __getitem__(self, wanted: Wanted) -> Read | Fault:
        with generators_kept():
            try:
                return self._read(wanted)
            except (CodeError, CacheError) as error:
                return Fault.of(error)

    def _read(self, wanted: Wanted) -> Read:
        faults: list[tuple[int, str, bool]] = []
        found: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
        code, rows = self._splits[wanted.split]
        for number, row, variant in wanted.items:
            try:
                with code.guarded(f"row {row}"):
                    sample = rows.read(row, variant)
            except CodeError:
                raise
            except DataError as error:
                faults.append((number, error.what, _may_pass(error)))
                continue
            shapes = tuple(getattr(value, "shape", None) for value in sample.values())
            own = {**sample, "key": SampleKey(variant, row), "weight": 1.0}
            found.setdefault(shapes, []).append((number, own))
        batches: list[tuple[Batch | list[str], list[int]]] = []
        for samples in found.values():
            with code.guarded("the dataset's collate"):
                collated = rows.dataset.collate([sample for _, sample in samples])
            batches.append((code.finished(collated, [0], "what collate returns"), [n for n, _ in samples]))
        return Read(wanted.chunk, batches, faults)


def _may_pass(error: BaseException | None) -> bool:
    """Whether the system refused something, such as a file on a network share, and no decoder the content."""
    while error is not None:
        # EPERM is what decoders return for damaged content, and Pillow's errors have no number.
        refused = isinstance(error, OSError) and error.errno not in (None, errno.EPERM)
        if refused or isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
