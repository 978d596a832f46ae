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
    """The file that a config or a command line names; the path as it is written where it leads nowhere."""
    with suppress(OSError, RuntimeError, ValueError):  # links in a circle, `~name` of nobody, a NUL character
        return Path(path).expanduser().resolve()
    return Path(path)


@dataclass(frozen=True)
class LocalFile:
    """A one-file plugin as it was read, once: its hash is that of the bytes that run.

    fault: why it could not be read; there is no source then. stored: a stored run names it, and nothing has
    allowed its code, so that what it imports from beside it is checked too.
    """

    path: Path
    source: bytes = b""
    fault: str | None = None
    stored: bool = False

    @property
    def piece(self) -> Piece:
        """As the list of known code has it."""
        return Piece(str(self.path), digest_of(self.source))


def read_local(path: Path, stored: bool = False) -> LocalFile:
    """The file; one that cannot be read says why."""
    try:
        return LocalFile(path, read_source(path), stored=stored)
    except (OSError, ValueError) as error:
        return LocalFile(path, fault=plain_reason(error), stored=stored)


def local_record(file: LocalFile) -> PluginRecord:
    """The record of a one-file plugin before its import. Its version is its content, so that ranks
    that see different files notice."""
    path, digest = file.path, digest_of(file.source)[:12]
    fault = None
    if file.fault is not None:
        fault = f"plugin file {str(path)!r} cannot be read: {file.fault}"
    elif path.suffix != ".py" or not path.stem.isidentifier():
        what = f"plugin file {str(path)!r} must be named like a Python module"
        fault = f"{what}: letters, digits, '_', then '.py'"
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
    """A name in sys.modules that no package, no other file, and no other content of this file has."""
    return f"{LOCAL_PREFIX}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:8]}_{path.stem}"


def import_file(file: LocalFile, name: str) -> ModuleType:
    """Imports the file as module `name`. Dataclasses and pickles look their module up there."""
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
    """Name -> file of each one-file plugin that this process has imported."""
    found = {}
    for name, module in list(sys.modules.items()):
        loader = module.__loader__ if name.startswith(LOCAL_PREFIX) else None
        if isinstance(loader, SourceBytes):
            path = Path(loader.path)
            found[name] = LocalFile(path, loader.source, stored=is_checked(path.parent))
    return found


def import_again(files: dict[str, LocalFile]) -> None:
    """Imports the one-file plugins of another process, so that what it pickled can be read here."""
    for name, file in files.items():
        import_file(file, name)
