"""One-file plugins that a config names: `plugins: {path: [./my_dit.py]}`, namespace `local`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from mm_core.plugin.records import PluginRecord

NAMESPACE = "local"
_PREFIX = "mm_local_"


def local_record(path: Path) -> PluginRecord:
    """The record of a one-file plugin before its import. Its version is its content, so that ranks
    that see different files notice."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return PluginRecord(
            NAMESPACE,
            path.stem,
            str(path),
            "?",
            "failed",
            f"plugin file {str(path)!r} can not be read: {error.strerror}",
            file=str(path),
        )
    record = PluginRecord(NAMESPACE, module_name(path, digest), path.name, f"sha256:{digest}", file=str(path))
    if path.suffix != ".py" or not path.stem.isidentifier():
        return PluginRecord(
            NAMESPACE,
            path.stem,
            path.name,
            record.version,
            "failed",
            f"plugin file {str(path)!r} must be named like a Python module: letters, digits, '_', then '.py'",
            file=str(path),
        )
    return record


def module_name(path: Path, digest: str) -> str:
    """A name in sys.modules that no package, no other file, and no other content of this file has."""
    return f"{_PREFIX}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:8]}_{path.stem}"


def import_file(path: Path, name: str) -> ModuleType:
    """Imports the file as module `name`. Dataclasses and pickles look their module up there."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # local_record has checked the suffix
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def imported_files() -> dict[str, str]:
    """Name -> file of each one-file plugin that this process has imported."""
    return {
        name: str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(_PREFIX) and module.__file__
    }


def import_again(files: dict[str, str]) -> None:
    """Imports the one-file plugins of another process, so that what it pickled can be read here."""
    for name, file in files.items():
        import_file(Path(file), name)
