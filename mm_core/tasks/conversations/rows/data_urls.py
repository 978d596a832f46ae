"""Images that a row holds itself: data URLs (RFC 2397) in base64, and columns of a Parquet file."""

from __future__ import annotations

import base64
import binascii
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from mm_core.errors import first_line, plural

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType

_HEAD = re.compile(r"(?i)data:(image/[\w.+-]+|application/octet-stream|)(;[\w.-]+=[^;,]*)*;base64,")
_LARGEST = 64 * 2**20
"""Most characters of a data URL: an image of 48 MiB."""


def decoded(url: str) -> tuple[str, bytes]:
    """The media type of an image in a data URL, and its bytes.

    Raises:
        ValueError: it is not an image in base64, or too large; the reason.
    """
    if len(url) > _LARGEST:
        raise ValueError(f"it has {plural(len(url), 'character')}, more than {_LARGEST:,}")
    head = _HEAD.match(url)
    if head is None:
        raise ValueError("it does not begin as data:image/TYPE;base64,")
    text = unquote(url[head.end() :]) if "%" in url else url[head.end() :]
    try:
        return head[1].lower() or "of no type", base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as fault:
        raise ValueError(f"what follows is not base64: {fault}") from None


@dataclass(frozen=True)
class Held:
    """A cell of a Parquet file with the bytes of images, which is read when its row is used.

    Attributes:
        file: the file.
        column: name of the column.
        row: number of the row, from 0.
    """

    file: str
    column: str
    row: int

    def value(self) -> object:
        """The cell: a list of images, one, or None.

        Raises:
            ValueError: the file cannot be read, or has changed; the reason.
        """
        from pyarrow import ArrowException

        try:
            starts = _starts(self.file)
            group = bisect_right(starts, self.row) - 1
            value: object = _column(self.file, self.column, group)[self.row - starts[group]].as_py()
            return value
        except (ArrowException, OSError, IndexError, KeyError) as fault:
            raise ValueError(first_line(fault)) from fault


def held_columns(file: str, columns: Sequence[str]) -> list[str]:
    """Those of the columns that hold bytes in a Parquet file; [] if it cannot be read."""
    try:
        from pyarrow import ArrowException, parquet

        schema = parquet.read_schema(file)
    except (ImportError, ArrowException, OSError):
        return []  # reading the rows reports it
    return [name for name in columns if name in schema.names and _has_bytes(schema.field(name).type)]


def _has_bytes(kind: DataType) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    if types.is_struct(kind):
        return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


@lru_cache(maxsize=64)
def _starts(file: str) -> list[int]:
    """The first row of each row group."""
    from pyarrow import parquet

    found: Any = parquet.read_metadata(file)
    sizes = (found.row_group(number).num_rows for number in range(found.num_row_groups))
    return list(accumulate(sizes, initial=0))[:-1]


@lru_cache(maxsize=2)
def _column(file: str, column: str, group: int) -> ChunkedArray:
    from pyarrow import parquet

    return parquet.ParquetFile(file).read_row_group(group, columns=[column])[column]
