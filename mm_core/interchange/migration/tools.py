"""Which installed migration reads the files of a user."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mm_core.errors import ConfigError, MMError
from mm_core.interchange.migration.migrated import Migration
from mm_core.interchange.migration.shell import read_script
from mm_core.interchange.migration.sources import read_source
from mm_core.interchange.migration.table import Key, SupportsKeys
from mm_core.plugin.records import MIGRATIONS, not_installed
from mm_core.plugin.registry import Registry


def migration_of(registry: Registry, paths: Sequence[Path], name: str | None = None) -> Migration:
    """The migration that recognises files or folders.

    Args:
        registry: the plugins.
        paths: the files or folders.
        name: of the migration, where the user gives it.

    Raises:
        MMError: none recognises them, or several do.
    """
    for path in paths:
        if not path.exists():
            raise MMError("there is no such file or folder", where=str(path))
    if name is not None:
        return _built(registry, name)
    known = {each.qualified: _built(registry, each.qualified) for each in registry.components("migration")}
    found = [each for each, migration in known.items() if migration.recognise(paths)]
    if len(found) == 1:
        return known[found[0]]
    for file in (path for path in paths if path.is_file() and not found):  # broken ones first
        read_script(file) if file.suffix == ".sh" else read_source(file)
    shown = ", ".join(map(str, paths))
    tools = ", ".join(sorted(f"{migration.tool} ({each})" for each, migration in known.items()))
    if found:
        what, hint = f"{' and '.join(found)} recognise these files", "name one with --from"
        raise MMError(what, where=shown, hint=hint)
    absent = [not_installed(namespace, registry.plugins) for namespace in MIGRATIONS]
    hint = "; ".join(["give all files of the run, or its folder", *filter(None, absent)])
    raise MMError("no installed migration recognises these files", where=shown, accepted=tools, hint=hint)


def foreign(registry: Registry, path: Path) -> ConfigError | None:
    """The error for a config that is a file of another tool; None if no migration recognises it."""
    for each in registry.components("migration") if path.exists() else ():
        with suppress(MMError):  # a broken migration hides no error of the config
            migration = _built(registry, each.qualified)
            if not migration.recognise([path]):
                continue
            hint = f"`mm migrate {path} --out run.yaml` makes a config of it; "
            hint += "if it starts no run alone, give all files of the run, or their folder"
            what = f"this is a {'folder' if path.is_dir() else 'file'} of {migration.tool}"
            return ConfigError(what, where=str(path), hint=hint)
    return None


def ours_of(registry: Registry, word: str) -> str | None:
    """The hint for an unknown key that installed migrations know; None: none does.

    Args:
        registry: the plugins.
        word: the key, or the last part of its path, in the tool's files.
    """
    tools: dict[str, list[str]] = {}
    for each in registry.components("migration"):
        with suppress(Exception):  # a broken migration hides no error of the config
            migration = _built(registry, each.qualified)
            for row in migration.keys if isinstance(migration, SupportsKeys) else ():
                last = row.theirs.rpartition(".")[2].lstrip("-").replace("-", "_")
                if last == word and isinstance(row, Key) and row.ours and "*" not in row.ours:
                    known = tools.setdefault(" and ".join(row.ours.split()), [])
                    known += [migration.tool] * (migration.tool not in known)
    named = [f"{ours} ({', '.join(theirs)})" for ours, theirs in sorted(tools.items(), key=_most)]
    return f"this key of another tool is {' or '.join(named[:2])} here" if named else None


def _most(item: tuple[str, list[str]]) -> int:
    return -len(item[1])


def _built(registry: Registry, name: str) -> Migration:
    migration: Migration = registry.build("migration", name)
    return migration
