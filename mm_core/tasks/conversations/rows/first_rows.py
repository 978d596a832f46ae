"""What the rows of a file of conversations must show, for `mm validate` and the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mm_core.data.rows.json_rows import checkable
from mm_core.data.rows.paths import check_folder
from mm_core.errors import DataError, MMError, plural
from mm_core.tasks.conversations.rows.reading import RawRow, conversation, read_rows
from mm_core.tasks.conversations.rows.turns import ACCEPTED

_HEAD = 100
"""Rows of a file that are read to check a config."""


def some_usable(file: Path, source: int) -> Iterator[RawRow]:
    """Rows of a file. After the last row, raises DataError if none is a readable conversation."""
    first, bad, usable = None, 0, False
    for row in read_rows(file, source):
        if not usable:
            try:
                conversation(row.value, f"{file}, {row.place}")
                usable = True
            except DataError as fault:
                first, bad = first or fault, bad + 1
        yield row
    if usable:
        return
    if first is None:
        raise DataError("the file contains no conversations", where=str(file), accepted=ACCEPTED)
    raise DataError(
        f"none of {plural(bad, 'conversation')} can be used; error of the first: {first.what}",
        where=first.where,
        accepted=first.accepted,
    )


def faults(options: Mapping[str, Any]) -> Iterator[MMError]:
    """Errors that the first rows of the files of conversations show, for `mm validate` and the plan.

    Args:
        options: of the dataset.
    """
    for number, source in enumerate(options["sources"]):
        file, folder = Path(source.annotations), source.folder
        try:
            if folder is not None and checkable(Path(folder)):
                check_folder(Path(folder), "the folder of the images")
            if checkable(file):
                for _ in islice(some_usable(file, number), _HEAD):
                    pass
        except DataError as fault:
            yield fault
