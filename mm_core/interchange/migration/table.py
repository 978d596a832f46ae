"""Tables of another tool's keys: what each becomes in our config, or why it has no place there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mm_core.interchange.migration.migrated import Left, Migrated
from mm_core.schema.nodes import Node, to_python

UNKNOWN = "an unknown key of the tool"
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a key that is off; 0 is one, too."""


class Instead(ValueError):
    """A conversion raises it for a value without a counterpart, in whose place another is written."""

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(f"{why}; {value} is written in its place")
        self.value = value


@dataclass(frozen=True)
class Row:
    """A row about a key of the tool.

    Attributes:
        theirs: its dotted path; `*` stands for any text.
        only: the row is about these values of the key alone; empty: about all.
        given: the row counts where other keys have a value, which are named in one text: `a` is not off,
            `a=b|c` is one of these, `a!=b|c` is none of them; `none` is an absent key.
    """

    theirs: str
    only: tuple[Any, ...] = field(default=(), kw_only=True)
    given: str = field(default="", kw_only=True)

    def holds(self, source: Node) -> bool:
        """Whether the other keys have the values that the row needs."""
        for each in self.given.split():
            path, equals, values = each.partition("=")
            value = value_at(source, path.rstrip("!"))
            one = str(value).lower() in values.split("|") if equals else value not in NOTHING
            if one == path.endswith("!"):
                return False
        return True

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
        absent: the tool's value where the key is absent, which is converted and written, too; `...`: none is.
        of: other keys, each with what counts where it is absent: `convert` takes their values, too.
    """

    ours: str = ""
    convert: Callable[..., Any] | None = None
    note: str = ""
    absent: Any = field(default=..., kw_only=True)
    of: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


@runtime_checkable
class SupportsKeys(Protocol):
    """A migration whose keys are named where a config of ours has one of them.

    Attributes:
        keys: rows of the tool's keys; a word is looked up in the last parts of their paths.
    """

    keys: Sequence[Row]


@dataclass(frozen=True)
class Default(Row):
    """A key that, where it is absent, has another default in the tool than here.

    Attributes:
        ours: our dotted key. Empty: the tool's default has no counterpart, for the reason in `note`.
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


def value_at(source: Node, path: str, default: Any = None) -> Any:
    """The plain value at a dotted path of mappings and lists; a null counts as absent, and so does what only
    a shell knows.
    """
    node = node_at(source, path)
    value = None if node is None or is_loose(node) else to_python(node)
    return default if value is None else value


def node_at(source: Node, path: str) -> Node | None:
    """The node at a dotted path of mappings and lists."""
    found: Node | None = source
    for key in path.split("."):
        if found is not None and isinstance(found.value, list):
            found = dict(enumerate(found.value)).get(int(key)) if key.isdigit() else None
        else:
            found = found.at(key) if found is not None else None
    return found


def apply(rows: Sequence[Row], source: Node, into: Migrated) -> None:
    """Applies rows to what a file or a command line holds. Of the rows about a key that hold, the first
    counts; a key without one is reported as unknown, under those without a counterpart.

    Args:
        rows: of the tool.
        source: a mapping.
        into: receives the lines.
    """
    rows = [row for row in rows if row.holds(source)]
    for node in _keys(rows, source):
        value = to_python(node)
        row = _row_of(rows, node.path, value)
        why = row.why if isinstance(row, (Drop, Differs)) else UNKNOWN
        if isinstance(row, Key) and not is_loose(node):
            try:
                _take(row, value, place_of(node), node.path, source, into)
                continue
            except (ValueError, TypeError, KeyError) as error:
                why = str(error)
        elif is_loose(node) and not isinstance(row, Drop):
            why = "its value is known only where the script runs"
        left = into.dropped if isinstance(row, Drop) else into.differs
        left.append(Left(place_of(node), node.path, value, why))
    for row in rows:
        given = source.at(*row.theirs.split("."))
        place = f"default of the tool for {row.theirs}"
        if isinstance(row, Default) and given is None and row.ours:
            into.set(row.ours, row.value, place, row.note)
        elif isinstance(row, Default) and given is None:
            into.differs.append(Left(place, row.theirs, row.value, row.note))
        elif isinstance(row, Key) and row.absent is not ... and (given is None or is_loose(given)):
            _take(row, row.absent, place, row.theirs, source, into)


def _take(row: Key, value: Any, place: str, path: str, source: Node, into: Migrated) -> None:
    others = [value_at(source, other, absent) for other, absent in row.of.items()]
    try:
        made = row.convert(value, *others) if row.convert is not None else value
    except Instead as error:
        into.differs.append(Left(place, path, value, str(error)))
        made = error.value
    names, match = row.ours.split(), row.match(path, value)
    for ours, each in zip(names, made if len(names) > 1 else [made], strict=False):
        for text in match.groups() if match is not None else ():
            ours = ours.replace("*", text, 1)
        into.set(ours, each, place, row.note)


def _keys(rows: Sequence[Row], node: Node) -> Iterator[Node]:
    """The values that rows are about. Mappings, and lists of them, are taken apart, unless a row is about one
    as a whole and none about a key in it."""
    inner = node.value if isinstance(node.value, list) else [node]
    apart = bool(inner) and all(isinstance(each.value, dict) for each in inner)
    if apart and node.path and _row_of(rows, node.path, to_python(node)) is not None:
        apart = _below(rows, node)
    if not apart:
        yield node
        return
    for child in node.children:
        yield from _keys(rows, child)


def _below(rows: Sequence[Row], node: Node) -> bool:
    return any(row.theirs.startswith(f"{node.path}.") for row in rows)


def _row_of(rows: Sequence[Row], path: str, value: Any) -> Row | None:
    return next((row for row in rows if row.match(path, value)), None)


def is_loose(node: Node) -> bool:
    """Whether only a shell that runs the script knows the value."""
    return any(leaf.loose for leaf in node.leaves())
