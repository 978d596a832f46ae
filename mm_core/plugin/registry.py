"""The registry of components: resolves names, and builds components from their configs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from mm_core.errors import PluginError, article, did_you_mean, plural
from mm_core.plugin.building import build_component, built_fields
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.manager import discover, local_files
from mm_core.plugin.records import PluginRecord, Registered, not_installed
from mm_core.schema.checking import check_component
from mm_core.schema.fields import ComponentConfig

__all__ = ["PluginRecord", "Registered", "Registry", "build", "get_registry", "survey"]

_LIST = "`mm plugins list` shows all components"


class Registry:
    """All plugins that were found, and the components of those that loaded.

    Args:
        plugins: all plugins, `core` first, including broken and disabled ones.
    """

    def __init__(self, plugins: tuple[PluginRecord, ...]) -> None:
        self.plugins = plugins
        self._by_name: dict[str, dict[str, list[Registered]]] = {kind: defaultdict(list) for kind in KINDS}
        for registered in self.components():
            for name in registered.names:
                table = self._by_name[registered.kind]
                table[name].append(registered)
                table[f"{registered.namespace}/{name}"].append(registered)

    def components(self, kind: str | None = None) -> tuple[Registered, ...]:
        """All components of the loaded plugins, or those of one kind."""
        return tuple(c for plugin in self.plugins for c in plugin.components if kind in (None, c.kind))

    def resolve(self, kind: str, name: str) -> Registered:
        """Finds the component of a kind by its qualified name, its bare name or an alias.

        A bare name that the core has means the core's component: installing a plugin never changes the
        meaning of a config. Other bare names must be unique.

        Raises:
            PluginError: there is no such component (the error lists similar names and plugins that failed to
                load), or the bare name is ambiguous.
        """
        if kind not in KINDS:
            raise PluginError(
                f"there is no kind of component named {kind!r}",
                accepted=", ".join(KINDS),
                hint=did_you_mean(kind, KINDS),
            )
        matches = self._by_name[kind].get(name, [])
        own = [match for match in matches if match.namespace == "core"]
        if len(matches) == 1 or len(own) == 1:
            return (own or matches)[0]
        if matches:
            what = f"the {kind} name {name!r} is ambiguous: {plural(len(matches), 'plugin')} provide one"
            accepted = ", ".join(sorted(match.qualified for match in matches))
            raise PluginError(what, accepted=accepted, hint="write the qualified name")
        raise self._not_found(kind, name)

    def build(self, kind: str, config: ComponentConfig | Mapping[str, Any] | str, *args: Any) -> Any:
        """Builds a component from its config. Components in its fields are built first.

        Args:
            kind: kind of the component.
            config: a name, a mapping with `type` (which is checked first), or a checked reference.
            args: arguments that the core passes by position to targets of this kind (see hookspecs).

        Raises:
            ConfigError: lists every error in the mapping.
        """
        if isinstance(config, ComponentConfig):
            checked = config
        else:
            mapping = {"type": config} if isinstance(config, str) else config
            checked = check_component(kind, mapping, self, kind)
        if checked.kind != kind:
            raise PluginError(
                f"{checked.type!r} is {article(checked.kind)}, but {article(kind)} is needed here",
                hint=f"use {article(kind)}: {_LIST}",
            )
        return build_component(checked, self, args)

    def target_of(self, config: ComponentConfig) -> tuple[Any, dict[str, Any]]:
        """The target of a component and its fields, without calling it: for class methods of the target."""
        return self.resolve(config.kind, config.type).load_target(), built_fields(config, self)

    def _not_found(self, kind: str, name: str) -> PluginError:
        known = self._by_name[kind]
        near = did_you_mean(name, [other for other in known if ("/" in other) == ("/" in name)])
        kinds = [other for other, table in self._by_name.items() if other != kind and name in table]
        others = [f"{name!r} is {article(other)}, not {article(kind)}" for other in reversed(kinds)]
        hints = [*others, near, *self._lost_hints(name)]
        names = sorted({registered.qualified for registered in self.components(kind)})
        return PluginError(
            f"no {kind} is named {name!r}",
            accepted=", ".join(names) or f"nothing: no installed plugin provides {article(kind)}",
            hint="; ".join(dict.fromkeys(hint for hint in hints if hint)) or None,
        )

    def _lost_hints(self, name: str) -> list[str]:
        """The plugins that did not load and may provide `name`: all of them, or the one of its namespace."""
        namespace = name.partition("/")[0] if "/" in name else None
        lost = [plugin for plugin in self.plugins if plugin.status != "ok"]
        absent = not_installed(namespace or name, self.plugins)  # a plugin's main component has its name
        if namespace in (None, *(plugin.namespace for plugin in self.plugins)):
            states = [_state(plugin) for plugin in lost if namespace in (None, plugin.namespace)]
            return [*filter(None, [absent]), *states]
        return [absent or f"no plugin {namespace!r} is installed", *map(_state, lost)]

    def find(self, name: str) -> tuple[Registered, ...]:
        """The components of any kind with a name or alias.

        Raises:
            PluginError: there is none.
        """
        tables = self._by_name.values()
        if found := tuple(r for table in tables for r in table.get(name, ())):
            return found
        known = {other for table in tables for other in table if ("/" in other) == ("/" in name)}
        hints = filter(None, [did_you_mean(name, sorted(known)), *self._lost_hints(name)])
        raise PluginError(f"no component is named {name!r}", hint="; ".join(hints) or _LIST)

    def fingerprint_table(self) -> dict[str, str]:
        """Version, status and component hash of each plugin that is not disabled, to compare ranks."""
        return {
            f"{plugin.namespace} ({plugin.distribution})": (
                f"{plugin.version}, {plugin.status}, components {_digest(plugin)}"
            )
            for plugin in self.plugins
            if plugin.status != "disabled"
        }


def _state(plugin: PluginRecord) -> str:
    words = {"failed": "failed to load", "refused": "was refused", "disabled": "is disabled"}
    return f"{plugin.label} {words[plugin.status]}: {plugin.error}"


def _digest(plugin: PluginRecord) -> str:
    """A hash of a plugin's components."""
    offers = [(r.kind, r.component) for r in plugin.components]
    rows = [[kind, c.name, c.target, c.config, sorted(c.aliases), dict(c.capabilities)] for kind, c in offers]
    texts = sorted(json.dumps(row, default=_plain) for row in rows)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:8]


def _plain(value: object) -> object:
    """A value that JSON cannot hold as text that is equal in every process: sets have no order, and the
    repr of an object may contain its address."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def get_registry(local_paths: Sequence[str] = (), stored: Collection[str] = ()) -> Registry:
    """The registry of the installed plugins and of one-file plugins.

    A run uses the registry of its config (`RunConfig.registry`). Imported plugins stay imported, so that
    another registry costs only milliseconds. A broken installed plugin is reported in one line on stderr,
    once per process and on the first rank only.

    Args:
        local_paths: the files of one-file plugins.
        stored: those of the files that a stored run names and that have not been allowed.

    Raises:
        PluginError: a one-file plugin does not load; with MM_PLUGINS_STRICT=1, any plugin does not load.
        TrustError: this user has not trained with a file in `stored`.
    """
    registry = Registry(discover(local_files(local_paths, stored), os.environ))
    _raise_if_needed(registry.plugins)
    _report(registry.plugins)
    return registry


def build(kind: str, config: ComponentConfig | Mapping[str, Any] | str, *args: Any) -> Any:
    """Builds a component of an installed plugin: `build("scheduler", {"type": "flow_match", "shift": 5.0})`.

    Components that a run's config names are built by the config's registry:
    `config.registry.build("task", config.task)`. See `Registry.build`.
    """
    return get_registry().build(kind, config, *args)


def survey(local_paths: tuple[str, ...] = ()) -> Registry:
    """A registry for inspecting plugins: broken plugins are neither reported nor raise an error.

    Args:
        local_paths: the files of one-file plugins.
    """
    return Registry(discover(local_files(local_paths), os.environ))


def is_strict() -> bool:
    """Whether a broken plugin is an error: with MM_PLUGINS_STRICT=1.

    Raises:
        PluginError: the variable has another value than 0 or 1.
    """
    strict = os.environ.get("MM_PLUGINS_STRICT", "")
    if strict not in ("", "0", "1"):
        raise PluginError(f"{strict!r} is not a valid value", where="MM_PLUGINS_STRICT", accepted="0 or 1")
    return strict == "1"


def _report(plugins: tuple[PluginRecord, ...]) -> None:
    """Warns once, on the first rank only, of each broken plugin and of each plugin that imports torch."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return
    for plugin in plugins:
        if plugin.broken:
            _warn(_state(plugin))
        if plugin.imports_torch and plugin.file is None:
            what = f"{plugin.label} imports torch when it is loaded, which makes every command slow"
            _warn(f"{what}: import torch only in the target's module")


@cache
def _warn(line: str) -> None:
    sys.stderr.write(f"mm: warning: {line}\n")


def _raise_if_needed(plugins: tuple[PluginRecord, ...]) -> None:
    if is_strict() and (broken := [plugin for plugin in plugins if plugin.broken]):
        raise PluginError(
            "; ".join(map(_state, broken)),
            where="MM_PLUGINS_STRICT=1",
            hint="`mm plugins check` lists every error",
        )
    # A config that names a one-file plugin needs it.
    if broken := [plugin for plugin in plugins if plugin.broken and plugin.file is not None]:
        raise PluginError(
            "; ".join(f"{plugin.error}" for plugin in broken),
            where="plugins.path",
            hint="`mm plugins check --path FILE` checks one such file",
        )
