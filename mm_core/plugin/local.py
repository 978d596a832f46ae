"""One-file plugins that a config names: `plugins: {path: [./my_dit.py]}`, namespace `local`.

The hash of a plugin does not cover the modules that it imports from its own folder. Somebody may put another
`my_lib.py` beside a plugin that this user has trained with, and a plugin may put any folder on `sys.path`. So
every module that is found beside the plugin, or in a folder that the plugin put on `sys.path`, is recorded
when the user trains, and checked when a stored run imports it. One import hook does this, and imports the
plugins themselves: the bytes that it compares with the record are the bytes that it compiles.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from mm_core.errors import plain_reason
from mm_core.plugin.records import PluginRecord
from mm_core.plugin.trust.known import Piece, check_known, digest_of, read_source, untrusted

NAMESPACE = "local"
LOCAL_PREFIX = "mm_local_"
"""Prefix of the names of one-file plugins in sys.modules."""

_OURS = ("mm_core", "transformers_modules")
"""Top-level packages that never belong to a plugin. (Files that Transformers copies are checked at their
source.)"""

_WHAT = "a module that a plugin of a stored run imports"


def resolved_file(path: str) -> Path:
    """The absolute path of a one-file plugin; the path as written if it cannot be resolved."""
    with suppress(OSError, RuntimeError, ValueError):  # circular links, `~name` of no user, a NUL character
        return Path(path).expanduser().resolve()
    return Path(path)


@dataclass(frozen=True)
class LocalFile(importlib.abc.InspectLoader):
    """A one-file plugin, or a module that it brings, read once: the bytes that are hashed are those that run.

    It is the import loader of these bytes. Python's own would read the file again, or use `__pycache__`,
    which was not checked.

    Attributes:
        path: the file.
        source: its content.
        fault: why it cannot be read; there is no source then.
        stored: a stored run names it and its code has not been allowed, so modules that it imports from its
            folder are checked too.
    """

    path: Path
    source: bytes = b""
    fault: str | None = None
    stored: bool = False

    @property
    def piece(self) -> Piece:
        """The one-file plugin as an entry for the list of code that this user has trained with."""
        return Piece(str(self.path), digest_of(self.source))

    def get_code(self, fullname: str) -> CodeType:
        """The compiled code of the source bytes."""
        return compile(self.source, str(self.path), "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        """The source text, for tracebacks."""
        return self.source.decode(errors="replace")


def read_local(path: Path, stored: bool = False) -> LocalFile:
    """Reads a one-file plugin; if that fails, the result contains the reason."""
    try:
        return LocalFile(path, read_source(path), stored=stored)
    except (OSError, ValueError) as error:
        return LocalFile(path, fault=plain_reason(error), stored=stored)


def local_record(file: LocalFile) -> PluginRecord:
    """The record of a one-file plugin before its import.

    Its version is a hash of its content, so that ranks with different files are detected.
    """
    path, digest = file.path, digest_of(file.source)[:12]
    name, version, fault = path.name, f"sha256:{digest}", None
    if file.fault is not None:
        name, version = str(path), "?"
        fault = f"plugin file {str(path)!r} cannot be read: {file.fault}"
    elif path.suffix != ".py" or not path.stem.isidentifier():
        what = f"plugin file {str(path)!r} must be named like a Python module"
        fault = f"{what}: use letters, digits and '_', then '.py'"
    if fault is not None:
        return PluginRecord(NAMESPACE, path.stem, name, version, "failed", fault, file=str(path))
    return PluginRecord(NAMESPACE, module_name(path, digest), name, version, file=str(path))


def module_name(path: Path, digest: str) -> str:
    """The module name of a one-file plugin, unique for its path and its content."""
    return f"{LOCAL_PREFIX}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:8]}_{path.stem}"


def import_file(file: LocalFile, name: str) -> ModuleType:
    """Imports a one-file plugin as a module in sys.modules, where dataclasses and pickles look it up."""
    finder = _Finder.of(file.path.parent)
    finder.files[name], finder.checked, finder.running = file, file.stored, True
    before = _entries()
    try:
        return importlib.import_module(name)
    finally:
        finder.running = False
        finder.added |= _entries() - before


def imported_files() -> dict[str, LocalFile]:
    """The one-file plugins that this process has imported: module name -> file."""
    return {
        name: replace(file, stored=finder.checked)
        for finder in _Finder.of_process()
        for name, file in finder.files.items()
        if name in sys.modules
    }


def import_again(files: dict[str, LocalFile]) -> None:
    """Imports the one-file plugins of another process, so that objects it pickled can be loaded here."""
    for name, file in files.items():
        import_file(file, name)


def imported_code(plugins: Collection[str]) -> Iterator[Piece]:
    """The code that the one-file plugins of these names have run in this process: files and folders."""
    for finder in _Finder.of_process():
        if files := [file for name, file in finder.files.items() if name in plugins and name in sys.modules]:
            yield from (file.piece for file in files)
            yield from finder.imported()


@dataclass(eq=False)
class _Finder(importlib.abc.MetaPathFinder):
    """Import finder for the one-file plugins in a folder, and for the modules that they bring.

    Attributes:
        folder: the plugins' folder, with links resolved.
        own: sys.path before the first plugin ran.
        loaded: top-level packages imported before the first plugin ran.
        checked: the plugin imported last belongs to a stored run, so its modules are checked; otherwise they
            are only recorded.
        running: a plugin is being imported.
        added: folders that plugins put on sys.path.
        files: the plugins: module name -> file.
    """

    folder: Path
    own: frozenset[Path]
    loaded: frozenset[str]
    checked: bool = False
    running: bool = False
    added: frozenset[Path] = frozenset()
    files: dict[str, LocalFile] = field(default_factory=dict)

    @classmethod
    def of_process(cls) -> list[_Finder]:
        """The finders of this process."""
        return [finder for finder in sys.meta_path if isinstance(finder, cls)]

    @classmethod
    def of(cls, folder: Path) -> _Finder:
        """The finder for a folder, before Python's own finder of files."""
        for finder in cls.of_process():
            if finder.folder == folder:
                return finder
        made = cls(folder, _entries(), frozenset(name.partition(".")[0] for name in sys.modules.copy()))
        sys.meta_path.insert(sys.meta_path.index(PathFinder), made)
        return made

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a plugin, or of its module that was checked; None leaves a module to the next finder.

        Raises:
            TrustError: the module must not be imported.
        """
        if (file := self.files.get(fullname)) is not None:
            return spec_from_file_location(fullname, file.path, loader=file)
        top = fullname.partition(".")[0]
        if not self.checked or top in self.loaded or _of_another_finder(top):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        entry = None if spec is None else _entry(spec)
        return None if spec is None or entry is None or not self.gives(entry) else _checked(spec)

    def gives(self, path: str) -> bool:
        """Whether modules found at an entry of sys.path belong to the plugins: it is in their folder, or they
        put it on sys.path."""
        entry = Path(path).resolve()
        installed = any(entry.is_relative_to(folder) for folder in _installations())
        if installed or (entry in self.own and entry != self.folder):
            return False
        return self.running or entry in self.added or entry.is_relative_to(self.folder)

    def imported(self) -> Iterator[Piece]:
        """The modules that the plugins have imported so far, without the plugins themselves."""
        gives = cache(self.gives)  # thousands of modules come from a few entries of sys.path
        for name, module in sys.modules.copy().items():  # other threads import
            spec = getattr(module, "__spec__", None)
            if not isinstance(spec, ModuleSpec) or name.startswith(LOCAL_PREFIX):
                continue
            if (path := _entry(spec)) is None or not gives(path):
                continue
            if isinstance(spec.loader, LocalFile):
                yield spec.loader.piece
            elif isinstance(spec.loader, SourceFileLoader):
                with suppress(OSError):  # deleted meanwhile
                    yield _file(spec).piece


def _of_another_finder(top: str) -> bool:
    """Whether a package is neither on sys.path nor in a plugin's folder, as in an editable installation."""
    loader = getattr(getattr(sys.modules.get(top), "__spec__", None), "loader", None)
    return not isinstance(loader, LocalFile) and PathFinder.find_spec(top) is None


def _checked(spec: ModuleSpec) -> ModuleSpec:
    """A spec that runs the module's checked source bytes.

    Raises TrustError for unknown bytes, and for a module that is not Python source: such a file could be
    exchanged between the check and the import.
    """
    where = str(spec.origin)
    if type(spec.loader) is not SourceFileLoader:
        raise untrusted([where], where, _WHAT)
    spec.loader = file = _file(spec)
    check_known([file.piece], where, _WHAT)
    return spec


def _file(spec: ModuleSpec) -> LocalFile:
    path = Path(str(spec.origin))
    return LocalFile(path, read_source(path))


def _entries() -> frozenset[Path]:
    return frozenset(Path(entry or ".").resolve() for entry in sys.path)


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
