"""Modules that a one-file plugin imports from its own folder: code of the run, like the plugin itself.

The plugin's hash does not cover these modules. Somebody may put another `my_lib.py` beside a plugin that this
user has trained with, and a plugin may put any folder on `sys.path`. So every module that is found beside the
plugin, or in a folder that the plugin put on `sys.path`, is recorded when the user trains, and checked when a
stored run imports it.
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
"""Prefix of the names of one-file plugins in sys.modules."""

_OURS = ("mm_core", "transformers_modules")
"""Top-level packages that never belong to a plugin. (Files that Transformers copies are checked at their
source.)"""

_WHAT = "a module that a plugin of a stored run imports"


class SourceBytes(importlib.abc.InspectLoader):
    """Import loader that runs source bytes of a plugin that were read and checked before.

    Python's own loader would read the file again, or use `__pycache__`, which was not checked.
    """

    def __init__(self, source: bytes, path: str) -> None:
        self.source, self.path = source, path

    def get_code(self, fullname: str) -> CodeType:
        """The compiled code of a plugin's source bytes."""
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        """The source text of a plugin's module, for tracebacks."""
        return self.source.decode(errors="replace")


def spec_of(name: str, source: bytes, path: str, folders: Sequence[str] | None = None) -> ModuleSpec:
    """The import spec that runs checked source bytes of a plugin as a module.

    Args:
        name: name of the module.
        source: its source bytes.
        path: its file, for tracebacks.
        folders: for a package, the folders of its modules.
    """
    loader = SourceBytes(source, path)
    spec = spec_from_file_location(
        name, path, loader=loader, submodule_search_locations=None if folders is None else [*folders]
    )
    assert spec is not None
    return spec


@dataclass
class _Place:
    """The folder of a one-file plugin."""

    folder: Path
    own: frozenset[Path]  # sys.path before the plugin ran
    loaded: frozenset[str]  # top-level packages imported before the plugin ran
    checked: bool  # the plugin belongs to a stored run
    running: bool = False  # the plugin is being imported
    added: frozenset[Path] = frozenset()  # folders that the plugin put on sys.path

    def has(self, spec: ModuleSpec) -> bool:
        """Whether a module comes from the plugin's folder, or from a folder that it put on sys.path."""
        path = _entry(spec)
        return path is not None and self.gives(path)

    def gives(self, path: str) -> bool:
        """Whether modules found at an entry of sys.path belong to the plugin."""
        entry = Path(path).resolve()
        if _installed(entry) or (entry in self.own and entry != self.folder):
            return False
        return self.running or entry in self.added or entry.is_relative_to(self.folder)


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that comes before Python's own finder of files."""

    def __init__(self) -> None:
        self.places: dict[Path, _Place] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a plugin's module that was checked; None leaves the module to the next finder.

        Raises:
            TrustError: the module must not be imported.
        """
        top = fullname.partition(".")[0]
        places = [each for each in self.places.values() if each.checked and top not in each.loaded]
        if not places or _of_another_finder(top):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not any(place.has(spec) for place in places):
            return None
        return _checked(spec)


def _of_another_finder(top: str) -> bool:
    """Whether a package is neither on sys.path nor in a plugin's folder, as in an editable installation."""
    loader = getattr(getattr(sys.modules.get(top), "__spec__", None), "loader", None)
    return not isinstance(loader, SourceBytes) and PathFinder.find_spec(top) is None


def _checked(spec: ModuleSpec) -> ModuleSpec:
    """A spec that runs the module's checked source bytes.

    Raises TrustError for unknown bytes, and for a module that is not Python source: such a file could be
    exchanged between the check and the import.
    """
    where = str(spec.origin)
    if type(spec.loader) is not SourceFileLoader:
        raise untrusted([where], where, _WHAT)
    source = read_source(Path(where))
    check_known([Piece(where, digest_of(source))], where, _WHAT)
    return spec_of(spec.name, source, where, spec.submodule_search_locations)


@contextmanager
def watched(folder: Path, checked: bool) -> Iterator[None]:
    """Within the block, a one-file plugin is imported and the modules it imports are watched.

    Args:
        folder: the plugin's folder, with links resolved.
        checked: the plugin belongs to a stored run, so its modules are checked; otherwise they are only
            recorded.
    """
    places = _finder().places
    if folder not in places:
        loaded = frozenset(name.partition(".")[0] for name in sys.modules.copy())
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
    """Whether modules imported by one-file plugins in a folder are checked."""
    place = _finder().places.get(folder)
    return place is not None and place.checked


def imported_beside(folder: Path) -> Iterator[Piece]:
    """The modules that one-file plugins in a folder have imported so far, without the plugins themselves."""
    if (place := _finder().places.get(folder)) is None:
        return
    gives = cache(place.gives)  # thousands of modules come from a few entries of sys.path
    for name, module in sys.modules.copy().items():  # other threads import
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, ModuleSpec) or spec.origin is None or name.startswith(LOCAL_PREFIX):
            continue
        if (path := _entry(spec)) is None or not gives(path):
            continue
        if isinstance(spec.loader, SourceBytes):
            yield Piece(spec.origin, digest_of(spec.loader.source))
        elif isinstance(spec.loader, SourceFileLoader):
            try:
                yield Piece(spec.origin, digest_of(read_source(Path(spec.origin))))
            except OSError:  # deleted meanwhile
                continue


def _finder() -> _Finder:
    """The finder of this process."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    made = _Finder()
    # Built-in and frozen modules come first: they have no files.
    place = next((i for i, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(place, made)
    return made


def _entry(spec: ModuleSpec) -> str | None:
    """The entry of sys.path where a module was found; None for modules without a file, and for ours."""
    if not spec.has_location or spec.origin is None or spec.name.partition(".")[0] in _OURS:
        return None
    path = os.path.abspath(spec.origin)  # noqa: PTH100 - links are resolved later
    for _ in range(spec.name.count(".") + (spec.submodule_search_locations is not None) + 1):
        path = os.path.dirname(path)  # noqa: PTH120 - for thousands of modules, pathlib takes seconds
    return path


@cache
def _installations() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*(sysconfig.get_paths()[name] for name in names), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return tuple({Path(path).resolve() for path in paths})


def _installed(entry: Path) -> bool:
    return any(entry.is_relative_to(folder) for folder in _installations())
