"""Row files in JSON: a list, or one value per line (JSONL)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from mm_core.data.rows.paths import plain_file, refusal, status
from mm_core.errors import DataError, MMError, did_you_mean
from mm_core.files import absent, open_plain

_TOO_DEEP = "the JSON is nested too deeply"
_QUICK = 64 * 2**20
"""Bytes of a JSON list that is parsed in a second."""

_DEEPEST = 100
"""Maximum nesting of lists and objects in a row; Python's pickle supports less than 500."""


def checkable(path: Path) -> bool:
    """Whether the check of a config reads the first rows of a file, or looks at a folder: not if nothing is
    there, which is listed as missing, nor if it is a long JSON list, which can only be parsed as a whole."""
    if absent(path):
        return False
    with suppress(OSError, ValueError):  # refused: reading it shows why
        return path.suffix.lower() != ".json" or path.stat().st_size <= _QUICK
    return True


@dataclass(frozen=True)
class RowFile:
    """A file of a dataset's rows.

    Attributes:
        path: of the file.
        role: noun for the file in error messages, such as "annotation file".
        accepted: description of its rows for error messages.
        hint: returns a hint for a line that is not JSON.
    """

    path: Path
    role: str
    accepted: str
    hint: Callable[[str], str | None] = lambda line: None

    @contextmanager
    def opened(self, newline: str | None = None) -> Iterator[TextIO]:
        """A context with the open row file.

        Raises:
            DataError: the file is missing or cannot be read, also for errors in the block.
        """
        try:
            with TextIOWrapper(open_plain(self.path), "utf-8-sig", newline=newline) as file:
                yield file
        except MMError:
            raise
        except FileNotFoundError:
            raise self.missing() from None
        except UnicodeDecodeError as error:
            place = _bad_byte(self.path)  # the error's own position counts from the last buffer
            what = f"the {self.role} is not UTF-8 text (byte {error.start if place is None else place})"
            raise DataError(what, where=str(self.path), accepted=self.accepted) from None
        except (OSError, ValueError) as error:  # ValueError: not a valid path
            what = f"the {self.role} cannot be read: {refusal(error)}"
            raise DataError(what, where=str(self.path)) from None

    def check_file(self) -> None:
        """Checks that the row file exists and is a plain file.

        Raises:
            DataError: it is not.
        """
        if status(self.path, self.role) is None:
            raise self.missing()
        plain_file(self.path, self.role)

    def missing(self) -> DataError:
        """The error for a row file that does not exist."""
        folder = self.path.parent
        hint: str | None = None
        with suppress(OSError):  # a folder without permission to list it
            if folder.is_dir():
                hint = did_you_mean(self.path.name, [p.name for p in folder.iterdir()])
            else:
                hint = f"the folder {folder} does not exist either"
        return DataError(f"the {self.role} does not exist", where=str(self.path), hint=hint)

    def empty(self) -> DataError:
        """The error for a row file without content."""
        return DataError(f"the {self.role} is empty", where=str(self.path), accepted=self.accepted)

    def json_values(self) -> Iterator[tuple[str, Any]]:
        """Reads every row of the file as (name of its position, parsed value).

        The value is a DataError for a line that is not JSON, or a row nested too deeply. Of JSONL, one line
        is in memory at a time.

        Raises:
            DataError: the file as a whole is not JSON, or not a list of rows.
        """
        with self.opened() as file:
            head = _head(file)
            if self._is_jsonl([line.strip() for line in head if line.strip()]):
                for number, line in enumerate(chain(head, file), 1):
                    if line.strip():
                        yield f"line {number}", self._flat(self._parse(line.rstrip("\n"), number), number)
                return
            text = "".join(head) + file.read()
            del head
        rows = self._parse(text, None)
        del text
        if isinstance(rows, DataError):
            raise rows
        if not isinstance(rows, list):
            what = f"the file contains {kind_of(rows)}, not a list of rows"
            raise DataError(what, where=str(self.path), accepted=self.accepted)
        rows.reverse()
        for number in range(1, len(rows) + 1):
            yield f"row {number}", self._flat(rows.pop(), None)  # pop frees the row's memory

    def _is_jsonl(self, filled: Sequence[str]) -> bool:
        """Whether each line is a row, judged by the file's suffix, or by its first two non-empty lines.
        DataError if the file is empty."""
        if not filled:
            raise self.empty()
        if self.path.suffix.lower() in (".jsonl", ".ndjson"):
            return True
        # One list may be a row, or all rows; several lines that start with a list are JSONL.
        if not filled[0].startswith("{") and not (filled[0].startswith("[") and len(filled) > 1):
            return False
        try:
            json.loads(filled[0])
        except (ValueError, RecursionError) as error:  # valid JSON with too many digits or levels is a row
            return not isinstance(error, json.JSONDecodeError)
        return True

    def _parse(self, text: str, line: int | None) -> object:
        """The parsed text of a line (by its number), or of the complete file (None); a DataError if bad."""
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            number = (line or 1) + error.lineno - 1
            shown = next(islice(StringIO(text), error.lineno - 1, None), "").strip()
            what = f"this is not JSON: {error.msg} at column {error.colno} of `{shown[:120]}`"
            return self._unfit(what, number, self.hint(shown))
        except ValueError:  # more digits than sys.get_int_max_str_digits()
            return self._unfit("a whole number has too many digits", line)
        except RecursionError:
            return self._unfit(_TOO_DEEP, line)

    def _flat(self, value: object, line: int | None) -> object:
        """The value, or a DataError if it is nested too deeply to be pickled for data workers."""
        level: list[object] = [value]
        for _ in range(_DEEPEST):
            level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inside(outer)]
            if not level:
                return value
        return self._unfit(_TOO_DEEP, line)

    def _unfit(self, what: str, line: int | None, hint: str | None = None) -> DataError:
        where = str(self.path) if line is None else f"{self.path}:{line}"
        return DataError(what, where=where, accepted=self.accepted, hint=hint)


def _inside(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _head(file: Iterable[str]) -> list[str]:
    """The first lines, up to the second non-empty one."""
    head, filled = [], 0
    for line in file:
        head.append(line)
        filled += bool(line.strip())
        if filled == 2:
            break
    return head


def _bad_byte(path: Path) -> int | None:
    """The position of the first byte that is not UTF-8; None if the file cannot be read again."""
    if not path.is_file():
        return None
    place = 0
    with path.open("rb") as file:
        for line in file:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return place + error.start
            place += len(line)
    return None


def kind_of(value: object) -> str:
    """The kind of a value in a dataset's row, in words for an error message: `an object`, `text`, `null`."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    if isinstance(value, (list, str, dict)) and not value:
        return f"empty {names[type(value)].split()[-1]}"
    other = "a number" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"
    return names.get(type(value), other)
