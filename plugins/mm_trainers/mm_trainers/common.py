"""What the migrations share: what files hold, and the run that is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_core.errors import ConfigError, MMError, first_line
from mm_core.interchange import Left, Migrated, Node, node_at, place_of, read_source, value_at
from mm_trainers.values import listed

_8BIT = "optimizer adamw_8bit: pip install \"mm-core[low-bit]\"; its blocks are torchao's, not bitsandbytes'"


@dataclass(frozen=True)
class NoOptions:
    """Config of a migration: it has no keys."""


@dataclass
class Source:
    """A file, or a line of flags, and the run that is made of it."""

    node: Node
    run: Migrated

    def get(self, path: str, default: Any = None) -> Any:
        return value_at(self.node, path, default)

    def place(self, path: str) -> str:
        """Where a value was written; for one that is absent, that it is the tool's default."""
        found = node_at(self.node, path)
        return place_of(found) if found is not None else f"default of the tool for {path}"

    def set(self, ours: str, value: Any, path: str, note: str = "") -> None:
        """Sets a key of ours, from a path."""
        self.run.set(ours, value, self.place(path), note)

    def differ(self, path: str, why: str, key: str = "") -> None:
        """Lists what has no counterpart."""
        self.run.differs.append(Left(self.place(path), key or path, self.get(path, ""), why))

    def largest(self, paths: Sequence[str], default: Any) -> tuple[Any, str]:
        """The largest of the values at paths, which may be lists, and its path."""
        each = [(item, path) for path in paths for item in listed(self.get(path, default))]
        return max(each, key=lambda item: item[0])

    def take_off(self, why: str, *starts: str) -> None:
        """Moves lines of ours whose keys begin so to what does nothing here; defaults of the tool go."""
        for key, line in list(self.run.lines.items()):
            if key.startswith(starts):
                self.run.leave(key, why)
                if line.place.startswith("default of the tool"):
                    self.run.dropped.pop()


def settle(source: Source) -> None:
    """What is so in the runs of all tools: a name that is a folder's, a base in the dtype, a cache."""
    run, start = source.run, "train.adapters.0."
    name = run.lines["run.name"]
    run.name = re.sub(r"[^\w.-]+", "_", str(name.value)).strip("._") or "run"
    run.set("run.name", run.name, name.place)
    if f"{start}from" in run.lines:
        source.take_off("the file of the adapter decides", *(start + key for key in _OF_FILES))
    dtype, adapted = run.lines.get("engine.param_dtype"), any(key.startswith(start) for key in run.lines)
    if adapted and dtype is not None and dtype.value == "bf16" and "train.base_dtype" not in run.lines:
        run.set("train.base_dtype", "bf16", dtype.place, "theirs keeps the base in it")
    if (cache := run.lines.get("data.cache.dir")) is not None:
        run.set("data.cache.missing", "encode", cache.place, "or `mm cache build` fills it before the run")
    if run.lines["optimizer.type"].value == "adamw_8bit":
        run.todo.append(_8BIT)


_OF_FILES = ("rank", "alpha", "targets", "exclude", "decompose_factor")


def warm_up(source: Source, path: str) -> None:
    """A count of steps, or a share of the run."""
    if steps := source.get(path):
        source.set(f"lr_schedule.warmup_{'fraction' if steps < 1 else 'steps'}", steps, path)


@contextmanager
def checked(tool: str, root: Node) -> Iterator[None]:
    """Turns what values of other types cause into an error of the user."""
    try:
        yield
    except MMError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"a value here is none that {tool} takes: {first_line(error)}"
        hint = "compare with an example of the tool"
        raise ConfigError(what, where=str(file_of(root)), hint=hint) from error


def rooted(node: Node, start: str) -> Node:
    """A tree whose paths begin below `start`."""
    return replace(node, path=node.path.removeprefix(start)).mapped(lambda child: rooted(child, start))


def file_of(node: Node) -> Path:
    """The file that a node is from."""
    return Path(re.sub(r":\d+\Z", "", node.where))


def found(name: str, near: Path) -> Path | None:
    """A file that a run names, from where the command runs or from a folder above the run's file."""
    starts = (Path(), *near.resolve().parents)
    return next((start / name for start in starts if (start / name).is_file()), None)


def _given(node: Node) -> Node:
    """A tree without the keys that are null: the tools take their defaults for them."""
    if isinstance(node.value, dict):
        node = node.holding({key: child for key, child in node.value.items() if child.value is not None})
    return node.mapped(_given)


def inside(paths: Sequence[Path], *suffixes: str) -> Iterator[Path]:
    """The files with one of the suffixes, also those in folders."""
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.suffix in suffixes and file.is_file():
                yield file


def files_of(paths: Sequence[Path], suffixes: tuple[str, ...], is_one: Callable[[Node], bool]) -> list[Node]:
    """The files, also in folders, whose keys are of a tool; raises nothing."""
    roots = []
    for file in inside(paths, *suffixes):
        with suppress(MMError):
            roots.append(_given(read_source(file)))
    return [root for root in roots if is_one(root)]


class Reader:
    """A tool whose runs are in one file each.

    Attributes:
        tool: its name, for messages.
        suffixes: of its files.
    """

    tool: str
    suffixes: tuple[str, ...]

    def is_one(self, root: Node) -> bool:
        """Whether a file is of the tool, from the names of its keys."""
        raise NotImplementedError

    def runs(self, root: Node, paths: Sequence[Path]) -> list[Migrated]:
        """The runs in a file, which is one of some that a user gave."""
        raise NotImplementedError

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, is of the tool."""
        return bool(files_of(paths, self.suffixes, self.is_one))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """The runs that the files describe.

        Raises:
            MMError: a file cannot be read, or holds what has no counterpart.
        """
        found = []
        for root in files_of(paths, self.suffixes, self.is_one):
            with checked(self.tool, root):
                found += self.runs(root, paths)
        return found
