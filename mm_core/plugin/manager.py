"""Finds plugins, checks them and calls their hooks. A broken plugin becomes a record, never a crash."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pluggy

from mm_core import __version__ as CORE_VERSION
from mm_core.errors import PluginError, TrustError, did_you_mean, foreign_code
from mm_core.plugin import hookspecs
from mm_core.plugin.component import Component
from mm_core.plugin.hooks import HookFault, check_hooks, check_names, checked_components
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.local import NAMESPACE as LOCAL
from mm_core.plugin.local import LocalFile, import_file, local_record, read_local, resolved_file
from mm_core.plugin.records import PluginRecord, Registered, Status, one_line
from mm_core.plugin.requirements import admits, read_identity
from mm_core.plugin.trust.known import check_known

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "mm_core.plugins"
CORE = "core"
CORE_MODULE = "mm_core.builtin.plugin"
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9_.\-]*\Z")


@dataclass
class _Found:
    """A plugin during discovery, from its entry point or file to its final record."""

    record: PluginRecord
    file: LocalFile | None = None  # a one-file plugin

    def stop(self, status: Status, error: str) -> None:
        self.record = replace(self.record, status=status, error=error, components=())


def local_files(paths: Sequence[str], stored: Collection[str] = ()) -> tuple[LocalFile, ...]:
    """Reads one-file plugins, each file once.

    Args:
        paths: the files.
        stored: those of them that a stored run names.
    """
    places: dict[Path, bool] = {}
    for path in paths:
        place = resolved_file(path)
        places[place] = places.get(place, False) or path in stored
    return tuple(read_local(path, is_stored) for path, is_stored in places.items())


def discover(files: Sequence[LocalFile], environ: Mapping[str, str]) -> tuple[PluginRecord, ...]:
    """Finds all installed and one-file plugins, loads those that may be loaded, and returns a record of each.

    Args:
        files: one-file plugins.
        environ: environment variables (MM_PLUGINS, MM_PLUGINS_DISABLE).

    Raises:
        PluginError: an environment variable names a plugin that does not exist.
        TrustError: a stored run names a file that this user has not trained with; no plugin has run yet.
    """
    installed = [_Found(record) for record in entry_point_records()]
    local = [_Found(local_record(file), file) for file in files]
    _switch_off(installed, local, environ)
    _refuse(installed)
    check_known(
        [f.file.piece for f in local if f.file is not None and f.file.stored and f.record.status == "ok"],
        where="plugins.path",
    )
    found = installed + local
    _ask(found)
    _refuse_shared_local_names([f for f in local if f.record.status == "ok"])
    return tuple(f.record for f in found)


@lru_cache(maxsize=1)
def entry_point_records() -> tuple[PluginRecord, ...]:
    """One record per installed plugin, read from its metadata only; `core` first, then by name."""
    records = _entry_point_records()
    if not any(r.namespace == CORE and r.module == CORE_MODULE for r in records):
        # Running from a source tree that was never installed.
        records.append(PluginRecord(CORE, CORE_MODULE, "mm-core", CORE_VERSION))
    return tuple(sorted(records, key=lambda r: (r.module != CORE_MODULE, r.namespace, r.distribution)))


def _entry_point_record(point: EntryPoint) -> PluginRecord:
    text = (point.dist.read_text("METADATA") or point.dist.read_text("PKG-INFO") or "") if point.dist else ""
    name, version, requirements = read_identity(text)
    unfit = [each for each in requirements if not admits(each, CORE_VERSION)]
    return PluginRecord(
        namespace=point.name,
        module=point.value,
        distribution=name or "unknown distribution",
        version=version or "?",
        status="refused" if unfit else "ok",
        error=f"it requires {unfit[0]!r}, but this is mm-core {CORE_VERSION}" if unfit else None,
        requirement=", ".join(requirements) or None,
    )


def _entry_point_records() -> list[PluginRecord]:
    """The entry points that `importlib.metadata.entry_points` would list, but a distribution whose metadata
    cannot be read is a failed record, and hides no other."""
    from importlib.metadata import distributions  # takes 20 ms: not for `mm --help`

    records = []
    seen: set[str] = set()
    for distribution in distributions():
        path = getattr(distribution, "_path", None)
        folder = "unknown folder" if path is None else str(path)
        name = Path(folder).stem.partition("-")[0].lower().replace(".", "_")
        if path is not None and name in seen:
            continue  # shadowed by a distribution earlier on sys.path, as in `entry_points`
        seen.add(name)
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
            records += [_entry_point_record(point) for point in points]
        except Exception as error:
            sentence = f"the metadata in {folder} cannot be read: {one_line(error)}"
            records.append(PluginRecord(name, "?", name, "?", "failed", sentence))
    return records


def _switch_off(installed: list[_Found], local: list[_Found], environ: Mapping[str, str]) -> None:
    """Applies MM_PLUGINS (load only these installed plugins and core) and MM_PLUGINS_DISABLE."""
    known = sorted({f.record.namespace for f in installed} | {LOCAL})
    if "MM_PLUGINS" in environ:
        allowed = _names(environ, "MM_PLUGINS", known)
        for f in installed:
            if f.record.namespace not in allowed and f.record.module != CORE_MODULE:
                f.stop("disabled", f"not in MM_PLUGINS={environ['MM_PLUGINS']}")
    disabled = _names(environ, "MM_PLUGINS_DISABLE", known)
    if CORE in disabled:
        raise PluginError(
            "the plugin 'core' cannot be disabled",
            where="MM_PLUGINS_DISABLE",
            hint="remove `core` from the variable",
        )
    for f in installed + local:
        if f.record.namespace in disabled:
            f.stop("disabled", f"in MM_PLUGINS_DISABLE={environ['MM_PLUGINS_DISABLE']}")


def _names(environ: Mapping[str, str], variable: str, known: Sequence[str]) -> set[str]:
    names = {part.strip() for part in environ.get(variable, "").split(",")} - {""}
    for name in sorted(names - set(known)):
        raise PluginError(
            f"no plugin {name!r} is installed",
            where=f"{variable}={environ[variable]}",
            accepted=", ".join(known),
            hint=did_you_mean(name, known),
        )
    return names


def _refuse(installed: list[_Found]) -> None:
    """Refuses, before import, plugins whose namespace is invalid, reserved, or claimed by another plugin."""
    owners: dict[str, list[_Found]] = defaultdict(list)
    for f in installed:
        record = f.record
        if record.status == "disabled":
            continue
        if record.namespace in (CORE, LOCAL) and record.module != CORE_MODULE:
            f.stop("refused", f"the entry-point name {record.namespace!r} is reserved")
        elif not _NAMESPACE.match(record.namespace):
            what = f"the entry-point name {record.namespace!r} is not valid"
            f.stop("refused", f"{what}: use lower-case letters, digits, '_', '-' and '.'")
        else:
            owners[record.namespace].append(f)
    for namespace, claimants in owners.items():
        if len(claimants) > 1:
            records = [f.record for f in claimants]
            who = " and ".join(f"{r.distribution} {r.version} ({r.module})" for r in records)
            for f in claimants:
                f.stop("refused", f"the entry-point name {namespace!r} is claimed by {who}: uninstall one")


def _ask(found: list[_Found]) -> None:
    """Imports the plugins, registers them with pluggy, and collects what their hooks return."""
    manager = pluggy.PluginManager("mm_core")
    manager.add_hookspecs(hookspecs)
    for index, f in enumerate(found):
        if f.record.status == "ok":
            with _isolated(f):
                _register(manager, found, index)
    returned: dict[int, list[tuple[str, Component]]] = defaultdict(list)
    for kind, hook in KINDS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            index = int(implementation.plugin_name)
            with _isolated(found[index], f"hook {hook!r} failed: "):
                components = checked_components(hook, implementation.function())
                returned[index] += [(kind, component) for component in components]
    for index, pairs in returned.items():
        if found[index].record.status == "ok":
            with _isolated(found[index]):
                _complete(found[index], pairs)


@contextmanager
def _isolated(f: _Found, doing: str = "") -> Iterator[None]:
    """Records whatever a plugin's code raises as that plugin's status."""
    try:
        with foreign_code():
            yield
    except TrustError:
        raise
    except HookFault as fault:
        module = sys.modules.get(f.record.module.partition(":")[0])
        file = f.record.file or getattr(module, "__file__", None)
        line = "" if fault.line is None else f", line {fault.line}"
        f.stop("refused" if fault.refused else "failed", f"{fault} ({file}{line})" if file else str(fault))
    except Exception as error:
        f.stop("failed", doing + one_line(error))


def _register(manager: pluggy.PluginManager, found: list[_Found], index: int) -> None:
    f = found[index]
    torch_before = "torch" in sys.modules
    try:
        with foreign_code():
            module = _import(f)
    except (HookFault, TrustError):
        raise
    except Exception as error:
        f.stop("failed", f"import of {f.record.file or f.record.module} failed: {one_line(error)}")
        return
    finally:
        f.record = replace(f.record, imports_torch="torch" in sys.modules and not torch_before)
    taken = manager.get_name(module)
    if taken is not None:
        owner = found[int(taken)].record.namespace
        raise PluginError(
            f"the entry points {owner!r} and {f.record.namespace!r} name the same module {f.record.module!r}",
            hint=f"uninstall one of the two plugins: this one comes from {f.record.distribution}",
        )
    check_hooks(module)
    manager.register(module, name=str(index))


def _import(f: _Found) -> ModuleType:
    if f.file is not None:
        return import_file(f.file, f.record.module)
    if ":" in f.record.module:
        module = f.record.module.partition(":")[0]
        raise HookFault(f"the entry point {f.record.module!r} must name a module: write {module!r}")
    return import_module(f.record.module)


def _complete(f: _Found, offered: list[tuple[str, Component]]) -> None:
    check_names(offered)
    modules = {f.file.path.stem: f.record.module} if f.file is not None else {}
    plugin = (f.record.namespace, f.record.distribution, f.record.version)
    components = tuple(Registered(kind, component, *plugin, modules) for kind, component in offered)
    f.record = replace(f.record, components=components)


def _refuse_shared_local_names(local: list[_Found]) -> None:
    """Refuses one-file plugins that claim the same name: they all share the namespace `local`."""
    owners: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for f in local:
        for registered in f.record.components:
            for name in registered.names:
                owners[registered.kind, name].append(f)
    for (kind, name), claimants in owners.items():
        if len(claimants) > 1:
            who = " and ".join(str(f.record.file) for f in claimants)
            for f in claimants:
                f.stop("refused", f"the {kind} 'local/{name}' is defined by {who}: rename one of them")
