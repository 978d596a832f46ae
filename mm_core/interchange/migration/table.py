"""Tables of another tool's keys: what each becomes in our config, or why it has no place there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_core.interchange.migration.migrated import Left, Migrated
from mm_core.schema.nodes import Node, to_python

UNKNOWN = "an unknown key of the tool"


@dataclass(frozen=True)
class Row:
    """A row about a key of the tool.

    Attributes:
        theirs: its dotted path; `*` stands for any text.
        only: the row is about these values of the key alone; empty: about all.
        when: another key and values of it, None where it is absent: the row counts with these alone.
        unless: the same, where the row does not count.
    """

    theirs: str
    only: tuple[Any, ...] = field(default=(), kw_only=True)
    when: tuple[Any, ...] = field(default=(), kw_only=True)
    unless: tuple[Any, ...] = field(default=(), kw_only=True)

    def counts(self, source: Node) -> bool:
        """Whether the row counts, by other keys of a file."""

        def holds(key: str, *values: Any) -> bool:
            found = source.at(*key.split("."))
            return (None if found is None else to_python(found)) in values

        return not (self.when and not holds(*self.when)) and not (self.unless and holds(*self.unless))

    def match(self, path: str, value: object) -> re.Match[str] | None:
        """How the row is about a key with a value; None if it is not."""
        if self.only and value not in self.only:
            return None
        return re.fullmatch("(.*)".join(map(re.escape, self.theirs.split("*"))), path)


@dataclass(frozen=True)
class Key(Row):
    """A key that becomes one of ours.

    Attributes:
        ours: our dotted key, where a `*` stands for the text of theirs. Empty: the migration reads the key
            itself, with others. Several, with spaces between: `convert` makes a value for each.
        convert: makes our value of theirs; a ValueError states why it has no counterpart.
        note: what users should know of it.
    """

    ours: str = ""
    convert: Callable[[Any], Any] | None = None
    note: str = ""


@dataclass(frozen=True)
class Default(Row):
    """A key that, where it is absent, has another default in the tool than here.

    Attributes:
        ours: our dotted key; what other keys of theirs set it to stays. Empty: the tool's default has no
            counterpart, for the reason in `note`.
        value: what the tool's default is here.
        note: what users should know of it.
    """

    ours: str
    value: Any
    note: str = ""

    def match(self, path: str, value: object) -> None:
        """None: the row is about the key's absence."""


@dataclass(frozen=True)
class Drop(Row):
    """A key that does nothing here, and why."""

    why: str


@dataclass(frozen=True)
class Differs(Row):
    """A key without a counterpart, so that training would differ, and why."""

    why: str


def place_of(node: Node) -> str:
    """The place of a value, as comments name it: `train.sh:12 --lr`."""
    return f"{Path(node.where).name} {node.path}"


def apply(rows: Sequence[Row], source: Node, into: Migrated) -> None:
    """Applies rows to what a file or a command line holds. Of the rows about a key, the first counts; a key
    without one is reported as unknown, under those without a counterpart.

    Args:
        rows: of the tool.
        source: a mapping.
        into: receives the lines.
    """
    rows = [row for row in rows if row.counts(source)]
    for node in _keys(rows, source):
        value = to_python(node)
        row, match = _row_of(rows, node.path, value)
        why = row.why if isinstance(row, (Drop, Differs)) else UNKNOWN
        if isinstance(row, Key) and not is_loose(node):
            try:
                _take(row, match, node, into)
                continue
            except (ValueError, TypeError, KeyError) as error:
                why = str(error)
        elif is_loose(node) and not isinstance(row, Drop):
            why = "its value is known only where the script runs"
        left = into.dropped if isinstance(row, Drop) else into.differs
        left.append(Left(place_of(node), node.path, value, why))
    for row in rows:
        if isinstance(row, Default) and source.at(*row.theirs.split(".")) is None:
            place = f"default of the tool for {row.theirs}"
            if not row.ours:
                into.differs.append(Left(place, row.theirs, row.value, row.note))
            elif row.ours not in into.lines:
                into.set(row.ours, row.value, place, row.note)


def _take(row: Key, match: re.Match[str] | None, node: Node, into: Migrated) -> None:
    value: Any = to_python(node)
    value = row.convert(value) if row.convert is not None else value
    names = row.ours.split()
    for ours, each in zip(names, value if len(names) > 1 else [value], strict=False):
        for text in match.groups() if match is not None else ():
            ours = ours.replace("*", text, 1)
        into.set(ours, each, place_of(node), row.note)


def _keys(rows: Sequence[Row], node: Node) -> Iterator[Node]:
    """The values that rows are about. Mappings, and lists of them, are taken apart, unless a row is about one
    as a whole and none about a key in it."""
    inner = node.value if isinstance(node.value, list) else [node]
    apart = bool(inner) and all(isinstance(each.value, dict) for each in inner)
    if apart and node.path and _row_of(rows, node.path, to_python(node))[0] is not None:
        apart = _below(rows, node)
    if not apart:
        yield node
        return
    for child in node.children:
        yield from _keys(rows, child)


def _below(rows: Sequence[Row], node: Node) -> bool:
    return any(row.theirs.startswith(f"{node.path}.") for row in rows)


def _row_of(rows: Sequence[Row], path: str, value: Any) -> tuple[Row | None, re.Match[str] | None]:
    for row in rows:
        if match := row.match(path, value):
            return row, match
    return None, None


def is_loose(node: Node) -> bool:
    """Whether only a shell that runs the script knows the value."""
    return any(leaf.loose for leaf in node.leaves())
