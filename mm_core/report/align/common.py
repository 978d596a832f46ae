"""What two records have in common; sentences remain of the steps and gradients that only one of them has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mm_core.errors import plural, some
from mm_core.report.align.records import Record, Row

_MOST = 4
"""Steps that a sentence lists."""


def common(a: Record, b: Record) -> tuple[Record, Record, list[str]]:
    """Both records without what cannot be compared, and sentences about it.

    Args:
        a: the first record.
        b: the second.
    """
    notes = [
        f"the {side} record was not closed, its script has ended early: what both records have is compared"
        for side, record in (("first", a), ("second", b))
        if not record.closed
    ]
    here, there = _steps(a), _steps(b)
    both = here & there
    for side, steps in (("first", here - there), ("second", there - here)):
        if steps:
            notes.append(
                f"only the {side} record has {plural(len(steps), 'step')}, not compared: {_listed(steps)}"
            )
    one, two = _steps(a, "gradient") & both, _steps(b, "gradient") & both
    for side, steps in (("first", two - one), ("second", one - two)):
        if steps:
            where = "" if steps == both else f" in {plural(len(steps), 'step')} ({_listed(steps)})"
            notes.append(f"the {side} record has no gradients{where}: not compared")
    # Of a step that a record does not end, gradients may be missing because it was cut there.
    ended = _steps(a, "updated") & _steps(b, "updated") - (one ^ two)
    named = _gradients(a) & _gradients(b)

    def compared(row: Row) -> bool:
        alone = row.kind == "gradient" and row.step not in ended and (row.step, row.name) not in named
        return row.step in both and not alone

    a, b = (replace(record, rows=[row for row in record.rows if compared(row)]) for record in (a, b))
    return a, b, notes


def _steps(record: Record, kind: str | None = None) -> set[int]:
    return {row.step for row in record.rows if kind in (None, row.kind)}


def _gradients(record: Record) -> set[tuple[int, str]]:
    return {(row.step, row.name) for row in record.rows if row.kind == "gradient"}


def _listed(steps: Iterable[int]) -> str:
    """The numbers of steps, from 1."""
    return some([str(step + 1) for step in sorted(steps)], _MOST)
