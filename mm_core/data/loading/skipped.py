"""The skip ledger: the list of samples that could not be read, in runs/<name>/skipped.jsonl."""

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
from mm_core.errors import DataError, PartsError, plural
from mm_core.files import open_append

SKIPPED = "skipped.jsonl"
"""The file in a run's folder."""

MIN_DRAWS = 20
"""Samples drawn before the failed share is checked: one bad file among the first few proves nothing."""


class UnreadableError(DataError):
    """A sample and all its replacements could not be read. `failures` lists them."""

    def __init__(self, what: str, failures: Sequence[FailureRecord], **details: str | None) -> None:
        self.failures = list(failures)
        super().__init__(what, **details)


def records_of(error: DataError, index: int, replaced: bool) -> list[FailureRecord]:
    """Failure records of an unreadable sample, or of each of its unreadable parts."""
    if not isinstance(error, PartsError):
        return [FailureRecord(error.where or f"sample {index}", index, error.what, replaced=replaced)]
    return [
        FailureRecord(fault.where or f"part {part}", index, fault.what, part, error.of, replaced)
        for part, fault in error.faults.items()
    ]


class SkipLedger:
    """Lists each unreadable sample once in `skipped.jsonl`, and stops the run when too many are skipped.

    Several ranks may share the file: each line is appended under a lock, after reading the lines of other
    ranks. The failed share refers to the distinct samples that this rank has drawn since it started. A part
    of a sample counts as its share of the sample it first appeared in, and is listed once by its own number,
    whichever samples it belongs to in later epochs.

    Args:
        run_dir: the run's folder; `skipped.jsonl` is created in it with the first failure.
        max_failed_share: share of distinct samples that may be unreadable.
        min_draws: samples drawn before the share is checked.
    """

    def __init__(self, run_dir: Path, max_failed_share: float, min_draws: int = MIN_DRAWS) -> None:
        self.path = Path(run_dir) / SKIPPED
        self.max_failed_share = max_failed_share
        self.min_draws = min_draws
        self.draws = 0
        self._failed: set[tuple[bool, int]] = set()
        self._failed_share = Fraction(0)
        self._seen = bytearray()  # one byte for each sample of the dataset
        self.seen = 0  # distinct samples drawn, readable or not
        self._written: set[tuple[str, int]] = set()
        self._offset = 0

    @property
    def failed(self) -> float:
        """Number of distinct samples that could not be read; unreadable parts count as shares of samples."""
        return float(self._failed_share)

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes batches on, and enters the unreadable samples of each in the ledger first."""
        try:
            for batch in batches:
                self.add(batch)
                yield batch
        except UnreadableError as error:
            self.record(error.failures)
            raise

    def add(self, batch: Batch) -> None:
        """Enters a batch and its unreadable samples in the ledger.

        Raises:
            DataError: the share of unreadable samples is above the limit.
        """
        self.draws += len(batch) + len({failure.index for failure in batch.failures if failure.replaced})
        for key in batch.keys:
            self._meet(key.index)
        self.record(batch.failures)
        share = self.failed / self.seen
        if batch.failures and self.draws >= self.min_draws and share > self.max_failed_share:
            last = batch.failures[-1]
            raise DataError(
                f"{_short(self.failed)} of {plural(self.seen, 'sample')} could not be read ({share:.0%}),"
                f" more than data.loader.max_failed_share={self.max_failed_share:g} allows; "
                f"the last one: {last.id}: {last.reason}",
                where=str(self.path),
                hint="fix or remove the files listed there, or raise data.loader.max_failed_share",
            )

    def record(self, failures: Sequence[FailureRecord]) -> None:
        """Counts unreadable samples, and appends those that `skipped.jsonl` does not list yet."""
        for failure in failures:
            self._meet(failure.index)
            if (known := (failure.part is None, _number(failure))) not in self._failed:
                self._failed.add(known)
                self._failed_share += Fraction(1, failure.parts)
        fresh = [failure for failure in failures if (failure.id, _number(failure)) not in self._written]
        if not fresh:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_append(self.path) as file:
            with suppress(OSError):  # a file system without locks: at worst a line is written twice
                fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            for failure in fresh:
                if (failure.id, _number(failure)) not in self._written:
                    line = {"id": failure.id, "index": _number(failure), "reason": failure.reason}
                    text = json.dumps(line, ensure_ascii=False) + "\n"
                    file.write(text.encode(errors="backslashreplace"))  # half a character as a JSON escape
                    self._written.add((failure.id, _number(failure)))
            file.flush()
            os.fsync(file.fileno())
            self._offset = file.tell()

    def _catch_up(self, file: IO[bytes]) -> None:
        """Reads the lines written by other ranks or by an earlier start of this run."""
        file.seek(self._offset)
        added = file.read()
        if added and not added.endswith(b"\n"):
            file.write(b"\n")  # a crash left an incomplete last line
        for line in added.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # an incomplete line lists nothing
                entry = json.loads(line)
                self._written.add((entry["id"], entry["index"]))

    def _meet(self, index: int) -> None:
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1 - len(self._seen)))
        if not self._seen[index]:
            self._seen[index] = 1
            self.seen += 1


def _number(failure: FailureRecord) -> int:
    """The number of the part, or of the sample if no part is set."""
    return failure.index if failure.part is None else failure.part


def _short(count: float) -> str:
    return f"{count:.2f}".rstrip("0").rstrip(".")
