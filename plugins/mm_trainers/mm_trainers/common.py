"""What the migrations share: what files hold, conversions of values, rows for what is off."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_core.errors import ConfigError, MMError, first_line
from mm_core.interchange import (
    Default,
    Differs,
    Drop,
    Key,
    Left,
    Migrated,
    Node,
    Row,
    is_loose,
    place_of,
    read_source,
    to_python,
)

FASTER = "it changes speed or memory, not what is computed"
SAMPLING = "of samples during training alone"
LOGGING = "of logs and displays alone"
EXPORT = "of the files that are written: `mm export --dtype, --push`"
OFF = "off here too"
CACHE = "latents and states of captions are encoded once, into data.cache"
_8BIT = "optimizer adamw_8bit: pip install \"mm-core[low-bit]\"; its blocks are torchao's, not bitsandbytes'"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class NoOptions:
    """Config of a migration: it has no keys."""


@dataclass
class Source:
    """A file, or a line of flags, and the run that is made of it."""

    node: Node
    run: Migrated

    def node_at(self, path: str) -> Node | None:
        """The node at a dotted path, of mappings and lists."""
        found: Node | None = self.node
        for key in path.split("."):
            if found is not None and isinstance(found.value, list):
                found = dict(enumerate(found.value)).get(int(key)) if key.isdigit() else None
            elif found is not None:
                found = found.at(key)
        return found

    def get(self, path: str, default: Any = None) -> Any:
        """The plain value at a path; a null counts as absent, and so does what only a shell knows."""
        found = self.node_at(path)
        value = None if found is None or is_loose(found) else to_python(found)
        return default if value is None else value

    def place(self, path: str) -> str:
        """Where a value was written; for one that is absent, that it is the tool's default."""
        found = self.node_at(path)
        return place_of(found) if found is not None else f"default of the tool for {path}"

    def set(self, ours: str, value: Any, path: str, note: str = "") -> None:
        """Sets a key of ours, from a path."""
        self.run.set(ours, value, self.place(path), note)

    def take(self, ours: str, path: str, default: Any, note: str = "") -> Any:
        """Sets a key of ours to the value at a path, or to the tool's default; that value."""
        value = self.get(path, default)
        self.set(ours, value, path, note)
        return value

    def fill(self, ours: str, value: Any, path: str, note: str = "") -> None:
        """Sets a key of ours that no row has set."""
        if ours not in self.run.lines:
            self.set(ours, value, path, note)

    def differ(self, path: str, why: str) -> None:
        """Lists what has no counterpart."""
        self.run.differs.append(Left(self.place(path), path, self.get(path, ""), why))

    def drop(self, path: str, why: str) -> None:
        """Lists what does nothing here."""
        self.run.dropped.append(Left(self.place(path), path, self.get(path, ""), why))

    def take_off(self, why: str, *keys: str) -> None:
        """Moves lines of ours to what does nothing here."""
        for key in keys:
            self.run.leave(key, why)


def settle(run: Migrated) -> None:
    """A name that is a folder's; an optimizer and a schedule where theirs have no counterpart."""
    name = run.lines["run.name"]
    run.name = re.sub(r"[^\w.-]+", "_", str(name.value)).strip("._") or "run"
    run.set("run.name", run.name, name.place)
    for key, value in (("optimizer.type", "adamw"), ("lr_schedule.type", "constant")):
        if key not in run.lines:
            run.set(key, value, "in the place of theirs")
    if run.lines["optimizer.type"].value == "adamw_8bit":
        run.todo.append(_8BIT)


@contextmanager
def checked(tool: str, root: Node) -> Iterator[None]:
    """Turns what values of other types cause into an error of the user."""
    try:
        yield
    except MMError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"a value here is none that {tool} takes: {first_line(error)}"
        raise ConfigError(
            what, where=str(file_of(root)), hint="compare with an example of the tool"
        ) from error


def one_of(known: Mapping[Any, Any], instead: str = "") -> Callable[[Any], Any]:
    """A conversion of known values, in any case; another is an error that lists them."""

    def convert(value: Any) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if key not in known:
            rest = f"{instead} is written in its place" if instead else f"known: {', '.join(map(str, known))}"
            raise ValueError(f"{value!r} has no counterpart here; {rest}")
        return known[key]

    return convert


def norm(value: Any) -> float | None:
    """The largest norm of gradients; 0 is off."""
    return float(value) or None


def words(value: Any) -> list[str]:
    """A list of words, from one or from a text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def recompute(value: Any) -> str | None:
    """Which modules are recomputed."""
    return "auto" if value else None


DTYPE = one_of(
    {
        **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"},
        **{"fp32": "fp32", "float32": "fp32", "float": "fp32", "no": "fp32"},
    }
)


def known(
    theirs: str, ours: str, default: Any, convert: Any = None, *, note: str = "", absent: str = ""
) -> tuple[Row, ...]:
    """Rows for a key that is written out where it is absent, too."""
    return Key(theirs, ours, convert, note), Default(theirs, ours, default, absent)


def off(prefix: str, why: str, **defaults: Any) -> tuple[Row, ...]:
    """Rows for keys that do nothing at a value, or at those of a tuple, and have no counterpart at others."""
    return tuple(
        row
        for name, value in defaults.items()
        for row in (
            Drop(f"{prefix}{name}", OFF, only=value if isinstance(value, tuple) else (value, None)),
            Differs(f"{prefix}{name}", why),
        )
    )


def drops(prefix: str, names: str, why: str) -> tuple[Row, ...]:
    """Rows for keys that do nothing here, of which a text has the names."""
    return tuple(Drop(f"{prefix}{name}", why) for name in names.split())


def model_name(value: Any) -> str:
    """A model's folder as its path; a name on the hub with `hub:` before it."""
    name = str(value).rstrip("/")
    return f"hub:{name}" if _HUB.fullmatch(name) and not Path(name).exists() else name


def rooted(node: Node, start: str) -> Node:
    """A tree whose paths begin below `start`."""
    return replace(node, path=node.path.removeprefix(start)).mapped(lambda child: rooted(child, start))


def file_of(node: Node) -> Path:
    """The file that a node is from."""
    return Path(re.sub(r":\d+\Z", "", node.where))


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
    found = []
    for file in inside(paths, *suffixes):
        try:
            root = _given(read_source(file))
        except MMError:
            continue
        found += [root] if is_one(root) else []
    return found
