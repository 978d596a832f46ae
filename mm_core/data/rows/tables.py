"""Tables of rows: reading columns from JSON, JSONL, CSV, TSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mm_core.data.rows.json_rows import RowFile, kind_of
from mm_core.errors import DataError, did_you_mean, plural

if TYPE_CHECKING:
    from _csv import Reader

    from pyarrow import Array, RecordBatch, Scalar

Column = str | int
"""The name of a column, or its number from 0."""

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_ROLE = "table"
_ACCEPTED = (
    "JSON or JSONL of objects, whose keys are the columns, or of lists; CSV or TSV, with column names in the "
    "first line if columns are selected by name; Parquet"
)

_COLUMNS = {
    "path": (
        *("path", "video", "image", "media", "file", "file_name", "filename"),
        *("file_path", "video_path", "image_path", "media_path"),
    ),
    "caption": ("cap", "caption", "text", "prompt", "captions"),
}
"""Key of `columns` -> its default, and names of other tools."""
_OURS = {names[0] for names in _COLUMNS.values()}


class Cells(NamedTuple):
    """The selected cells of one row of a table.

    Attributes:
        place: line or row, from 1.
        values: one for each selected column; () if the row cannot be used.
        fault: the reason why the row cannot be used.
    """

    place: str
    values: tuple[Any, ...] = ()
    fault: str | None = None


def read_table(
    file: Path, columns: Sequence[Column], quotes: bool | None = None, optional: Collection[Column] = ()
) -> Iterator[Cells]:
    """Reads every row of a table as cells of the selected columns; broken rows are included.

    Args:
        file: of a kind in `SUFFIXES`.
        columns: names, or numbers from 0.
        quotes: whether fields in CSV and TSV may be in double quotes; False reads quotes as letters. None:
            they may, and the config has no key for it.
        optional: those of `columns` that the table, or a row of JSON, may lack: their cells are then None.

    Raises:
        DataError: the file is missing, of another kind, lacks a column, or has no rows. In JSON each row has
            its own columns: a row that lacks one is a broken row.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"the table's format is unknown: its name ends in {suffix or 'no suffix'}",
            where=str(file),
            accepted=", ".join(SUFFIXES),
            hint="rename the file, or convert it to one of these formats",
        )
    rows = RowFile(file, _ROLE, _ACCEPTED)
    rows.check_file()
    if suffix == ".parquet":
        found = _parquet(rows, columns, optional)
    elif suffix in (".csv", ".tsv"):
        found = _separated(rows, columns, optional, "," if suffix == ".csv" else "\t", quotes)
    else:
        found = _json_rows(rows, columns, optional)
    first = next(found, None)
    if first is None:
        raise DataError("the table has no rows", where=str(file), accepted=_ACCEPTED)
    yield first
    yield from found


def _json_rows(rows: RowFile, columns: Sequence[Column], optional: Collection[Column]) -> Iterator[Cells]:
    named = all(isinstance(column, str) for column in columns)
    needed = [column for column in columns if column not in optional]
    for place, value in rows.json_values():
        if named and type(value) is dict and all(column in value for column in needed):
            yield Cells(place, tuple([value.get(column) for column in columns]))  # most, of a million rows
        else:
            yield _json_cells(place, value, columns, optional)


def _json_cells(place: str, value: object, columns: Sequence[Column], optional: Collection[Column]) -> Cells:
    if isinstance(value, DataError):
        return Cells(place, fault=value.what)
    if not isinstance(value, (dict, list)):
        return Cells(place, fault=f"{kind_of(value)} instead of a row")
    cells: list[Any] = []
    for column in columns:
        if column in optional and not _has(value, column):
            cells.append(None)
            continue
        if isinstance(column, int):
            if not isinstance(value, list):
                return Cells(place, fault=f"column {column} is a number, but the row is an object with names")
            if column >= len(value):
                return Cells(place, fault=f"no column {column}: the row has {len(value)}")
            cells.append(value[column])
            continue
        if isinstance(value, list):
            return Cells(
                place, fault=f"column {column!r} is a name, but the row is a list: use a number from 0"
            )
        if column not in value:
            found = ", ".join(sorted(value)) or "nothing"
            advice = _advice(column, value)
            return Cells(
                place, fault=f"no column {column!r} (found: {found[:200]}){f'; {advice}' if advice else ''}"
            )
        cells.append(value[column])
    return Cells(place, tuple(cells))


def _has(row: Mapping[str, object] | Sequence[object], column: Column) -> bool:
    if isinstance(column, int):
        return not isinstance(row, list) or column < len(row)
    return column in row or isinstance(row, list)


def columns_for(names: Collection[str]) -> str | None:
    """The `columns` of a source of media_text whose table has other tools' names; None: not all are known."""
    found = {}
    for role, (ours, *others) in _COLUMNS.items():
        if ours not in names:
            found[role] = next((name for name in others if name in names), None)
    if not found or None in found.values():
        return None
    return f"columns: {{{', '.join(f'{role}: {name}' for role, name in found.items())}}}"


def _advice(column: Column, names: Collection[str]) -> str | None:
    """What reads a table without a column of ours, by the columns that it has; None: it is not known."""
    if column not in _OURS:
        return None
    if fit := columns_for(names):
        return f"set {fit}"
    of_turns = not {"conversations", "messages"}.isdisjoint(names)
    return "data.train.type: conversations reads rows of conversations" if of_turns else None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Raises the csv module's limit of 128 KB per field: texts are longer."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _separated(
    rows: RowFile,
    columns: Sequence[Column],
    optional: Collection[Column],
    separator: str,
    quotes: bool | None,
) -> Iterator[Cells]:
    """Rows of CSV and TSV. The first line contains names if a column is selected by name."""
    quoting: Literal[0, 3] = csv.QUOTE_NONE if quotes is False else csv.QUOTE_MINIMAL
    hint = "fix the line" + (", or set quotes: false to read quotes as letters" if quotes else "")
    with rows.opened(newline="") as file, _long_fields():
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        yield from _lines(rows, reader, columns, optional, hint)


def _lines(
    rows: RowFile, reader: Reader, columns: Sequence[Column], optional: Collection[Column], hint: str
) -> Iterator[Cells]:
    head: list[str] | None = None
    named = any(isinstance(column, str) for column in columns)
    places: list[int | None] = []
    last = 0
    try:
        for line in reader:
            start, last = last + 1, reader.line_num
            if not line:
                continue
            if head is None:
                head = line if named else [str(number) for number in range(len(line))]
                places = [_place(rows, column, head, optional) for column in columns]
                if named:
                    continue
            if len(line) != len(head):
                count = plural(len(line), "column")
                yield Cells(f"line {start}", fault=f"{count}, but the first line has {len(head)}")
                continue
            yield Cells(f"line {start}", tuple(None if place is None else line[place] for place in places))
    except csv.Error as error:
        raise DataError(
            f"the line cannot be split into columns: {error}",
            where=f"{rows.path}:{last + 1}",
            accepted='fields with quotes, separators or line ends in double quotes: "a ""b"" c"',
            hint=hint,
        ) from None
    if head is None:
        raise rows.empty()


def _place(rows: RowFile, column: Column, head: Sequence[str], optional: Collection[Column]) -> int | None:
    """The number of a column; None if an optional one does not exist. DataError if another does not."""
    if isinstance(column, int) and column < len(head):
        return column
    if (count := list(head).count(str(column))) == 1:
        return list(head).index(str(column))
    if count:
        raise DataError(
            f"{plural(count, 'column')} of the table are named {column!r}",
            where=str(rows.path),
            hint="rename all but one",
        )
    if column in optional:
        return None
    raise DataError(
        f"the table has no column {column!r}",
        where=str(rows.path),
        accepted=", ".join(head)[:400],
        hint=_advice(column, head) or did_you_mean(str(column), head),
    )


def _parquet(rows: RowFile, columns: Sequence[Column], optional: Collection[Column]) -> Iterator[Cells]:
    number = 0
    for batch in parquet_batches(rows.path, columns, optional):
        yield from batch_cells(batch, number)
        number += batch[0].num_rows


Batch = tuple["RecordBatch", Sequence[str | None]]
"""Rows of a Parquet file, and the name of each selected column; None: an optional one that it lacks."""


def parquet_batches(
    file: Path, columns: Sequence[Column], optional: Collection[Column] = ()
) -> Iterator[Batch]:
    """Reads a Parquet file in batches of rows; arguments and errors are those of `read_table`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow, which is not installed",
            where=str(file),
            hint="run: pip install 'mm-core[parquet]'",
        ) from None
    rows = RowFile(file, _ROLE, _ACCEPTED)
    rows.check_file()
    try:
        with parquet.ParquetFile(file) as table:
            head = list(table.schema_arrow.names)
            places = [_place(rows, column, head, optional) for column in columns]
            names = [None if place is None else head[place] for place in places]
            for batch in table.iter_batches(columns=sorted({name for name in names if name is not None})):
                batch.validate(full=True)  # text that is not UTF-8
                yield batch, names
    except (ArrowException, OSError, UnicodeError) as error:
        what = f"the table cannot be read as Parquet: {' '.join(str(error).split())[:200]}"
        raise DataError(what, where=str(file)) from None


def cells_of(column: Array) -> list[object]:
    """The values of a column; None for those that Python cannot hold, such as a date in the year 10000."""
    try:
        values: list[object] = column.to_pylist()
        return values
    except (ValueError, OverflowError):
        return [_cell(each) for each in column]


def _cell(scalar: Scalar) -> object:
    try:
        value: object = scalar.as_py()
        return value
    except (ValueError, OverflowError):
        return None


def batch_cells(batch: Batch, before: int) -> Iterator[Cells]:
    """The rows of a batch, of which `before` precede it in the table."""
    table = {name: cells_of(batch[0].column(name)) for name in set(batch[1]) - {None}}
    absent = [None] * batch[0].num_rows
    cells = (absent if name is None else table[name] for name in batch[1])
    for number, values in enumerate(zip(*cells, strict=True), before + 1):
        yield Cells(f"row {number}", values)
