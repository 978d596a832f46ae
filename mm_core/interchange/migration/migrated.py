"""What a migration yields: lines of our config with the places they came from, and what has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mm_core.config.dump import inline
from mm_core.config.interpolation import escape
from mm_core.config.sections import RunConfig
from mm_core.errors import printable
from mm_core.schema.nodes import keys_of


@dataclass(frozen=True)
class Line:
    """A value of our config.

    Attributes:
        value: plain, as in YAML.
        place: where it came from: `train.sh:12 --lr`, or `default of the tool`.
        note: what a reader should know beside it.
    """

    value: Any
    place: str
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A key of the tool that our config does not hold, and why."""

    place: str
    key: str
    value: Any
    why: str


@dataclass
class Migrated:
    """A run of another tool as one of ours.

    Attributes:
        name: of the run, which names its file where a command finds several.
        lines: dotted key of ours -> its value; a part that is a number is a place in a list.
        dropped: what does nothing here.
        differs: what has no counterpart, so that training would differ.
        todo: what the user has to set or do before training.
        launch: the command that trains the run, with its environment; `{config}` stands for the config.
        world: ranks in all.
    """

    name: str
    lines: dict[str, Line] = field(default_factory=dict)
    dropped: list[Left] = field(default_factory=list)
    differs: list[Left] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    launch: str = "mm-train --config {config}"
    world: int = 1

    def set(self, key: str, value: Any, place: str, note: str = "") -> None:
        """Sets a key of ours; a later value replaces an earlier one."""
        self.lines[key] = Line(value, place, note)

    def leave(self, key: str, why: str) -> None:
        """Moves a key of ours, if it is set, to what is dropped."""
        if (line := self.lines.pop(key, None)) is not None:
            self.dropped.append(Left(line.place, line.place.rpartition(" ")[2], line.value, why))


@runtime_checkable
class Migration(Protocol):
    """Reads the runs of another tool.

    Attributes:
        tool: its name, for messages.
    """

    tool: str

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether these files or folders are of the tool, from the names of their keys; raises nothing."""
        ...

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """The runs that these files or folders describe, the main one first.

        Raises:
            MMError: a file is missing or cannot be read.
        """
        ...


def to_yaml(migrated: Migrated, head: Sequence[str] = ()) -> str:
    """The YAML of a migrated run, with a comment behind each line: where it came from.

    Args:
        migrated: the run.
        head: lines of a comment at its beginning.
    """
    tree: dict[str, Any] = {}
    for key, line in migrated.lines.items():
        *above, last = key.split(".")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = line
    order = {section: place for place, section in enumerate(keys_of(RunConfig))}
    sections = sorted(tree.items(), key=lambda item: order.get(item[0], len(order)))
    comments = [f"# {printable(line)}".rstrip() for line in head]
    return "\n".join([*comments, *_written(dict(sections), "")]) + "\n"


def _written(tree: dict[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    items = all(key.isdigit() for key in tree)
    for key, value in sorted(tree.items(), key=lambda item: _first(item[0])):
        if isinstance(value, Line):
            note = printable(": ".join(part for part in (value.place, value.note) if part))
            start = "-" if items else f"{inline(key)}:"
            lines.append(f"{indent}{start} {inline(_escaped(value.value))}  # {note}")
        elif items:
            first, *rest = _written(value, indent + "  ")
            lines += [f"{indent}- {first.lstrip()}", *rest]
        else:
            lines += [f"{indent}{inline(key)}:", *_written(value, indent + "  ")]
    return lines


def _first(key: str) -> tuple[bool, int]:
    """`type` before the other keys of a component; items of a list in order."""
    return key != "type", int(key) if key.isdigit() else 0


def _escaped(value: Any) -> Any:
    """A value in which `${` of another tool is no interpolation of ours."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value
