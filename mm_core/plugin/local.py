"""One-file plugins that a config names: `plugins: {path: [./my_dit.py]}`, namespace `local`."""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from mm_core.errors import plain_reason
from mm_core.plugin.records import PluginRecord
from mm_core.plugin.trust.beside import LOCAL_PREFIX, SourceBytes, is_checked, spec_of, watched
from mm_core.plugin.trust.known import Piece, digest_of, read_source

NAMESPACE = "local"


def resolved_file(path: str) -> Path:
    """The absolute path of a one-file plugin; the path as written if it cannot be resolved."""
    with suppress(OSError, RuntimeError, ValueError):  # circular links, `~name` of no user, a NUL character
        return Path(path).expanduser().resolve()
    return Path(path)


@dataclass(frozen=True)
class LocalFile:
    """A one-file plugin, read once: the bytes that are hashed are the bytes that run.

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
    fault = None
    if file.fault is not None:
        fault = f"plugin file {str(path)!r} cannot be read: {file.fault}"
    elif path.suffix != ".py" or not path.stem.isidentifier():
        what = f"plugin file {str(path)!r} must be named like a Python module"
        fault = f"{what}: use letters, digits and '_', then '.py'"
    return PluginRecord(
        NAMESPACE,
        module_name(path, digest) if fault is None else path.stem,
        path.name if file.fault is None else str(path),
        f"sha256:{digest}" if file.fault is None else "?",
        "ok" if fault is None else "failed",
        fault,
        file=str(path),
    )


def module_name(path: Path, digest: str) -> str:
    """The module name of a one-file plugin, unique for its path and its content."""
    return f"{LOCAL_PREFIX}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:8]}_{path.stem}"


def import_file(file: LocalFile, name: str) -> ModuleType:
    """Imports a one-file plugin as a module in sys.modules, where dataclasses and pickles look it up."""
    with watched(file.path.parent, file.stored):
        if name in sys.modules:
            return sys.modules[name]
        spec = spec_of(name, file.source, str(file.path))
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            assert spec.loader is not None
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def imported_files() -> dict[str, LocalFile]:
    """The one-file plugins that this process has imported: module name -> file."""
    found = {}
    for name, module in sys.modules.copy().items():  # other threads import
        loader = module.__loader__ if name.startswith(LOCAL_PREFIX) else None
        if isinstance(loader, SourceBytes):
            path = Path(loader.path)
            found[name] = LocalFile(path, loader.source, stored=is_checked(path.parent))
    return found


def import_again(files: dict[str, LocalFile]) -> None:
    """Imports the one-file plugins of another process, so that objects it pickled can be loaded here."""
    for name, file in files.items():
        import_file(file, name)
