"""The account of samples that could not be read: runs/<name>/skipped.jsonl."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import IO

from mm_core.contracts import Batch, FailureRecord
from mm_core.errors import DataError

MIN_DRAWS = 20
"""Samples drawn before the failed share is judged: one bad file among the first few proves nothing."""


class UnreadableError(DataError):
    """Neither a sample nor any of its replacements could be read. `failures` lists them."""

    def __init__(self, what: str, failures: Sequence[FailureRecord], **details: str | None) -> None:
        self.failures = list(failures)
        super().__init__(what, **details)


class SkipLedger:
    """Writes each skipped sample once and stops the run when too many are skipped.

    Several ranks may share the file: each line is appended under a lock, after a look at what the
    others wrote. The share is of the distinct samples that this rank has met since it started. A part of a
    sample counts as its share of the sample that it was first met in, and is listed by its own number: once,
    whichever samples it belongs to in later epochs.

    Args:
        run_dir: the run's folder; `skipped.jsonl` is made in it with the first failure.
        max_failed_share: share of distinct samples that may be unreadable.
        min_draws: samples drawn before the share is judged.
    """

    def __init__(self, run_dir: Path, max_failed_share: float, min_draws: int = MIN_DRAWS) -> None:
        self.path = Path(run_dir) / "skipped.jsonl"
        self.max_failed_share = max_failed_share
        self.min_draws = min_draws
        self.draws = 0
        self._failed: set[tuple[bool, int]] = set()
        self._failed_share = Fraction(0)
        self._seen = bytearray()  # one byte a sample of the dataset
        self.seen = 0  # distinct samples met, readable or not
        self._written: set[tuple[str, int]] = set()
        self._offset = 0

    @property
    def failed(self) -> float:
        """Distinct samples that could not be read, and distinct parts as shares of samples."""
        return float(self._failed_share)

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, each entered in the ledger before it is handed on."""
        try:
            for batch in batches:
                self.add(batch)
                yield batch
        except UnreadableError as error:
            self.record(error.failures)
            raise

    def add(self, batch: Batch) -> None:
        """Enters a batch. DataError when the failed share has grown above the limit."""
        self.draws += len(batch) + len({failure.index for failure in batch.failures if failure.replaced})
        for key in batch.keys:
            self._meet(key.index)
        self.record(batch.failures)
        share = self.failed / self.seen
        if batch.failures and self.draws >= self.min_draws and share > self.max_failed_share:
            last = batch.failures[-1]
            raise DataError(
                f"{_short(self.failed)} of {self.seen} samples could not be read ({share:.0%}), more than "
                f"data.loader.max_failed_share={self.max_failed_share:g} admits; "
                f"the last: {last.id}: {last.reason}",
                where=str(self.path),
                hint="mend or drop the files that are listed there, or raise the share",
            )

    def record(self, failures: Sequence[FailureRecord]) -> None:
        """Counts failures and appends those that the file does not list yet."""
        for failure in failures:
            self._meet(failure.index)
            if (known := (failure.part is None, _number(failure))) not in self._failed:
                self._failed.add(known)
                self._failed_share += Fraction(1, failure.parts)
        fresh = [failure for failure in failures if (failure.id, _number(failure)) not in self._written]
        if not fresh:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            with suppress(OSError):  # a file system without locks: at worst a line stands twice
                fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            for failure in fresh:
                if (failure.id, _number(failure)) not in self._written:
                    line = {"id": failure.id, "index": _number(failure), "reason": failure.reason}
                    text = json.dumps(line, ensure_ascii=False) + "\n"
                    file.write(text.encode(errors="backslashreplace"))  # of half a character: JSON's escape
                    self._written.add((failure.id, _number(failure)))
            file.flush()
            os.fsync(file.fileno())
            self._offset = file.tell()

    def _catch_up(self, file: IO[bytes]) -> None:
        """Reads the lines that other ranks, or an earlier start of this run, have written."""
        file.seek(self._offset)
        added = file.read()
        if added and not added.endswith(b"\n"):
            file.write(b"\n")  # a crash tore the last line: the next one begins afresh
        for line in added.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line torn by a crash lists nothing
                entry = json.loads(line)
                self._written.add((entry["id"], entry["index"]))

    def _meet(self, index: int) -> None:
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1 - len(self._seen)))
        if not self._seen[index]:
            self._seen[index] = 1
            self.seen += 1


def _number(failure: FailureRecord) -> int:
    """The sample's, or the part's own."""
    return failure.index if failure.part is None else failure.part


def _short(count: float) -> str:
    return f"{count:.2f}".rstrip("0").rstrip(".")
