"""Labels of text rows: names of classes, their numbers, or values to predict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.errors import DataError, did_you_mean

_SHOWN = 5  # unknown labels listed in one error; the rest are counted


class Labels:
    """Reads the labels of a table's rows, and collects those that are unknown.

    A label is the name of a class, or its number from 0. If class names are numbers (1 to 5 stars), a label
    is always a name.
    """

    def __init__(self, wanted: TextRowsConfig) -> None:
        self._names = {name: number for number, name in enumerate(wanted.labels)}
        self._by_name = any(_parsed(name) is not None for name in wanted.labels)
        self._rating = wanted.label_type == "number"
        self._unknown: dict[str, list[str]] = {}

    def read(self, value: object, place: str) -> tuple[float | None, str | None]:
        """Reads the label of a row: (class or number, None), or (None, the error of the row)."""
        missing = value is None or value != value  # null, or NaN, which some libraries write instead
        if missing or (isinstance(value, str) and not value.strip()):
            return None, "the label is empty"
        number = self._number(value)
        if number is None:
            self._unknown.setdefault(str(value)[:60], []).append(place)
            return None, f"the label {str(value)[:60]!r} is unknown"
        return number, None

    def _number(self, value: object) -> float | None:
        """The class or number of a label; None if unknown."""
        name = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        named = self._names.get(name, self._names.get(name.strip()))
        if named is not None or self._by_name:
            return named
        number = _parsed(value)
        if self._rating or number is None:
            return number
        known = not self._names or number < len(self._names)
        return int(number) if known and number >= 0 and number == int(number) else None

    def check(self, file: Path) -> None:
        """Checks that all labels of the table's rows are known.

        Raises:
            DataError: lists the unknown labels and their rows.
        """
        if not self._unknown:
            return
        shown = [
            f"{label!r} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
            for label, places in list(self._unknown.items())[:_SHOWN]
        ]
        more = f" and {len(self._unknown) - _SHOWN} others" if len(self._unknown) > _SHOWN else ""
        one = next(iter(self._unknown))
        accepted = "numbers" if self._rating else ", ".join(self._names) or "whole numbers from 0"
        hint = "list the class names in the order of their numbers: labels: [...]"
        raise DataError(
            f"unknown labels: {', '.join(shown)}{more}",
            where=str(file),
            accepted=accepted[:400],
            hint=did_you_mean(one, self._names) if self._names else None if self._rating else hint,
        )


def _parsed(value: Any) -> float | None:
    """The value as a finite number; None if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
