"""Files of rows in JSON: a list, or an object a line (JSONL)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_core.errors import DataError, did_you_mean


def _no_hint(line: str) -> str | None:
    return None


@dataclass(frozen=True)
class RowFile:
    """A file of rows. role: what it is, in sentences. accepted: what its rows look like. hint: a remedy
    for a line that is not JSON."""

    path: Path
    role: str
    accepted: str
    hint: Callable[[str], str | None] = _no_hint

    def text(self) -> str:
        """All of it. DataError where it can not be read as UTF-8."""
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise self.missing() from None
        except UnicodeDecodeError as error:
            raise self.not_text(error) from None
        except OSError as error:
            raise self.unreadable(error) from None

    def missing(self) -> DataError:
        """The file does not exist."""
        folder = self.path.parent
        near = did_you_mean(self.path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else None
        hint = near or (None if folder.is_dir() else f"the folder {folder} does not exist either")
        return DataError(f"the {self.role} does not exist", where=str(self.path), hint=hint)

    def not_text(self, error: UnicodeDecodeError) -> DataError:
        """The file is in another encoding than UTF-8, or no text."""
        what = f"the {self.role} is not UTF-8 text (byte {error.start})"
        return DataError(what, where=str(self.path), accepted=self.accepted)

    def unreadable(self, error: OSError) -> DataError:
        """The system refuses the file."""
        return DataError(f"the {self.role} can not be read: {error.strerror}", where=str(self.path))

    def empty(self) -> DataError:
        """The file holds nothing."""
        return DataError(f"the {self.role} is empty", where=str(self.path), accepted=self.accepted)

    def json_values(self) -> Iterator[tuple[str, Any]]:
        """(a name for the row's place, its parsed value) for every row; a DataError is the value of a line
        that is not JSON. DataError for a file that as a whole is none."""
        text = self.text()
        if not text.strip():
            raise self.empty()
        lines = text.split("\n")  # not splitlines: texts may hold other line separators
        if self.path.suffix.lower() in (".jsonl", ".ndjson") or _starts_jsonl(lines):
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", self._parse(line, lines, number)
            return
        rows = self._parse(text, lines, 1)
        if isinstance(rows, DataError):
            raise rows
        if not isinstance(rows, list):
            what = f"the file holds {kind_of(rows)}, not a list of rows"
            raise DataError(what, where=str(self.path), accepted=self.accepted)
        for number, row in enumerate(rows, 1):
            yield f"row {number}", row

    def _parse(self, text: str, lines: list[str], first_line: int) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            number = first_line + error.lineno - 1
            shown = lines[number - 1].strip() if number <= len(lines) else ""
            what = f"this is not JSON: {error.msg} at column {error.colno} of `{shown[:120]}`"
            where, hint = f"{self.path}:{number}", self.hint(shown)
            return DataError(what, where=where, accepted=self.accepted, hint=hint)
        except RecursionError:
            what = "the JSON is nested too deeply"
            return DataError(what, where=str(self.path), accepted=self.accepted)


def _starts_jsonl(lines: list[str]) -> bool:
    """Whether the first row stands on a line of its own, whatever the file's name says."""
    filled = [line for line in lines if line.strip()]
    first = filled[0].strip()
    # A list may be a row, or all rows; several lines of them are JSONL.
    if not first.startswith("{") and not (first.startswith("[") and len(filled) > 1):
        return False
    try:
        json.loads(first)
    except json.JSONDecodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    """What a value of JSON or another table is, for sentences."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    if isinstance(value, (list, str, dict)) and not value:
        return f"empty {names[type(value)].split()[-1]}"
    other = "a number" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"
    return names.get(type(value), other)
