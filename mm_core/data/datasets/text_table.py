"""The rows of a table of texts, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.data.datasets.text_labels import Labels
from mm_core.data.rows.captions import half_character
from mm_core.data.rows.json_rows import kind_of
from mm_core.data.rows.tables import Cells, read_table
from mm_core.errors import DataError


@dataclass(frozen=True)
class TextRow:
    """A row of a table of texts.

    Attributes:
        place: line or row in the file.
        text: the text.
        other: its prompt, or the second text of a pair.
        label: class or number.
        fault: the reason why the row cannot be used.
    """

    place: str
    text: str = ""
    other: str | None = None
    label: float | None = None
    fault: str | None = None


def read_texts(wanted: TextRowsConfig, most: int | None = None) -> Iterator[TextRow]:
    """Reads every row of a table of texts, or the first `most`, also unusable ones, so that a split stays the
    same when they are fixed.

    Raises:
        DataError: as for `read_table`; after the last row: labels are unknown, or no row is usable.
    """
    file, labels = Path(wanted.file), Labels(wanted)
    other = wanted.prompt if wanted.label is None else wanted.pair
    columns = [column for column in (wanted.text, other, wanted.label) if column is not None]
    first: TextRow | None = None
    usable, count = False, 0
    for cells in islice(read_table(file, columns, wanted.quotes), most):
        row = _row(cells, other is not None, labels)
        first, usable, count = first or row, usable or row.fault is None, count + 1
        yield row
    labels.check(file)
    if not usable and count != most:
        assert first is not None
        raise DataError(
            f"no row of {count} can be used; {first.place}: {first.fault}",
            where=str(file),
            hint="check the column names in data.<split>: text, prompt, pair, label",
        )


def _row(cells: Cells, other: bool, labels: Labels) -> TextRow:
    if cells.fault is not None:
        return TextRow(cells.place, fault=cells.fault)
    text, *rest = cells.values
    second = rest.pop(0) if other else None
    for value in (text, *([second] if other else [])):
        if not isinstance(value, str) or not value.strip():
            found = "empty" if isinstance(value, str) else kind_of(value)
            return TextRow(cells.place, fault=f"the text is {found}")
        if half := half_character(value):
            return TextRow(cells.place, fault=f"the text contains {half}, half of a character")
    number, fault = labels.read(rest[0], cells.place) if rest else (None, None)
    return TextRow(cells.place, text, second, number, fault)
