"""Modules that a one-file plugin imports from beside it: code of the run as much as the plugin itself.

The plugin's hash is not theirs. A stranger may put a `my_lib.py` of his own beside a plugin that this user
has trained with, and a plugin may put any folder on `sys.path`. So every module that is found beside the
plugin, or in a folder that it has put there, is recorded when the user trains, and checked when a stored run
imports it.
"""

from __future__ import annotations

import importlib.abc
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from mm_core.plugin.trust.known import Piece, check_known, digest_of, read_source, untrusted

LOCAL_PREFIX = "mm_local_"
"""Start of the names that one-file plugins have in sys.modules."""

_OURS = ("mm_core", "transformers_modules")
"""Top packages that are never a plugin's: what Transformers copied is checked where it is copied from."""

_WHAT = "a module that a plugin of a stored run imports"


class SourceBytes(importlib.abc.InspectLoader):
    """Runs bytes that were read before. Python's own loader would read the file again, or take what lies in
    `__pycache__`, which nobody has looked at."""

    def __init__(self, source: bytes, path: str) -> None:
        self.source, self.path = source, path

    def get_code(self, fullname: str) -> CodeType:
        """The compiled bytes."""
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        """The text, for tracebacks."""
        return self.source.decode(errors="replace")


def spec_of(name: str, source: bytes, path: str, folders: Sequence[str] | None = None) -> ModuleSpec:
    """What imports the bytes as module `name` of that file. folders: of a package, where its modules are."""
    loader = SourceBytes(source, path)
    spec = spec_from_file_location(
        name, path, loader=loader, submodule_search_locations=None if folders is None else [*folders]
    )
    assert spec is not None
    return spec


@dataclass
class _Place:
    """The folder of a plugin. own: of sys.path, before the plugin ran. loaded: top packages imported by then.
    checked: of a stored run. running: the plugin is being imported. added: what it has put on sys.path."""

    folder: Path
    own: frozenset[Path]
    loaded: frozenset[str]
    checked: bool
    running: bool = False
    added: frozenset[Path] = frozenset()

    def has(self, spec: ModuleSpec) -> bool:
        """Whether a module comes from beside the plugin, or from where only the plugin has it looked for."""
        if (entry := _entry(spec)) is None or spec.name.partition(".")[0] in _OURS:
            return False
        if _installed(entry) or (entry in self.own and entry != self.folder):
            return False
        return self.running or entry in self.added or entry.is_relative_to(self.folder)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before Python's own finder of files."""

    def __init__(self) -> None:
        self.places: dict[Path, _Place] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None leaves a module to the finders that follow. TrustError for one that may not be imported."""
        top = fullname.partition(".")[0]
        places = [each for each in self.places.values() if each.checked and top not in each.loaded]
        if not places or _of_another_finder(top):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not any(place.has(spec) for place in places):
            return None
        return _checked(spec)


def _of_another_finder(top: str) -> bool:
    """Whether a package is not on sys.path and not from beside a plugin: an editable installation."""
    loader = getattr(getattr(sys.modules.get(top), "__spec__", None), "loader", None)
    return not isinstance(loader, SourceBytes) and PathFinder.find_spec(top) is None


def _checked(spec: ModuleSpec) -> ModuleSpec:
    """The same module of the bytes that were checked. TrustError for unknown ones, and for what is not Python
    source: there are no bytes to hash that nobody could exchange before they are loaded."""
    where = str(spec.origin)
    if type(spec.loader) is not SourceFileLoader:
        raise untrusted([where], where, _WHAT)
    source = read_source(Path(where))
    check_known([Piece(where, digest_of(source))], where, _WHAT)
    return spec_of(spec.name, source, where, spec.submodule_search_locations)


@contextmanager
def watched(folder: Path, checked: bool) -> Iterator[None]:
    """The block in which a plugin of that folder is imported.

    Args:
        folder: with its links followed.
        checked: the plugin is a stored run's; else what it imports is only told apart, to be recorded.
    """
    places = _finder().places
    if folder not in places:
        loaded = frozenset(name.partition(".")[0] for name in sys.modules)
        places[folder] = _Place(folder, _entries(), loaded, checked)
    place, before = places[folder], _entries()
    place.checked, place.running = checked, True
    try:
        yield
    finally:
        place.running = False
        place.added |= _entries() - before


def _entries() -> frozenset[Path]:
    return frozenset(Path(entry or ".").resolve() for entry in sys.path)


def is_checked(folder: Path) -> bool:
    """Whether what plugins of that folder import is checked."""
    place = _finder().places.get(folder)
    return place is not None and place.checked


def imported_beside(folder: Path) -> Iterator[Piece]:
    """The modules that the plugins of a folder have imported so far, but for the plugins."""
    if (place := _finder().places.get(folder)) is None:
        return
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, ModuleSpec) or spec.origin is None or name.startswith(LOCAL_PREFIX):
            continue
        if not place.has(spec):
            continue
        if isinstance(spec.loader, SourceBytes):
            yield Piece(spec.origin, digest_of(spec.loader.source))
        elif isinstance(spec.loader, SourceFileLoader):
            try:
                yield Piece(spec.origin, digest_of(read_source(Path(spec.origin))))
            except OSError:  # gone since
                continue


def _finder() -> _Finder:
    """The one of this process."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    made = _Finder()
    # Built-in and frozen modules, which come first, are nobody's files.
    place = next((i for i, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(place, made)
    return made


def _entry(spec: ModuleSpec) -> Path | None:
    """Of sys.path, where a module was found."""
    if not spec.has_location or spec.origin is None:
        return None
    up = spec.name.count(".") + (spec.submodule_search_locations is not None)
    parents = Path(os.path.abspath(spec.origin)).parents  # noqa: PTH100 - a link is followed from its folder on
    return parents[min(up, len(parents) - 1)].resolve()


@cache
def _installations() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*(sysconfig.get_paths()[name] for name in names), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return tuple({Path(path).resolve() for path in paths})


def _installed(entry: Path) -> bool:
    return any(entry.is_relative_to(folder) for folder in _installations())
