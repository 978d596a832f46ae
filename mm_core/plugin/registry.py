"""The table of components: resolving names, and building what a config describes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from mm_core.errors import PluginError, did_you_mean
from mm_core.plugin.building import build_component, built_fields
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.manager import discover, entry_point_records, local_files
from mm_core.plugin.records import PluginRecord, Registered
from mm_core.schema.checking import check_component
from mm_core.schema.fields import ComponentConfig

__all__ = ["PluginRecord", "Registered", "Registry", "build", "clear_cache", "get_registry", "survey"]


class Registry:
    """Every plugin that was found and the components of those that work.

    plugins: all of them, `core` first, the broken and the disabled included.
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
        """All components, or those of one kind."""
        return tuple(c for plugin in self.plugins for c in plugin.components if kind in (None, c.kind))

    def resolve(self, kind: str, name: str) -> Registered:
        """The component that `name` stands for: qualified, bare while unique, or an alias. A bare name that
        the core has is the core's: installing a plugin never changes what a config means.

        PluginError when there is none (with near names and the plugins that failed to load) or
        when a bare name is ambiguous.
        """
        if kind not in KINDS:
            raise PluginError(
                f"there is no kind {kind!r}", accepted=", ".join(KINDS), hint=did_you_mean(kind, KINDS)
            )
        matches = self._by_name[kind].get(name, [])
        own = [match for match in matches if match.namespace == "core"]
        if len(matches) == 1 or len(own) == 1:
            return (own or matches)[0]
        if matches:
            what = f"the {kind} name {name!r} is ambiguous: {len(matches)} plugins have one"
            accepted = ", ".join(sorted(match.qualified for match in matches))
            raise PluginError(what, accepted=accepted, hint="write the qualified name")
        raise self._not_found(kind, name)

    def build(self, kind: str, config: ComponentConfig | Mapping[str, Any] | str, *args: Any) -> Any:
        """Builds a component. Fields that are components are built before the component that holds them.

        Args:
            kind: of the component.
            config: a name, a mapping with `type` (checked first: ConfigError with every fault), or a checked
                reference.
            args: what the core passes by position to targets of this kind (see hookspecs).
        """
        if isinstance(config, ComponentConfig):
            checked = config
        else:
            mapping = {"type": config} if isinstance(config, str) else config
            checked = check_component(kind, mapping, self, kind)
        if checked.kind != kind:
            raise PluginError(f"{checked.type!r} was given as {checked.kind}, and {kind} is to be built")
        return build_component(checked, self, args)

    def target_of(self, config: ComponentConfig) -> tuple[Any, dict[str, Any]]:
        """What a checked reference would call, and the fields that it would call it with: for what a class
        offers beside its objects."""
        return self.resolve(config.kind, config.type).load_target(), built_fields(config, self)

    def _not_found(self, kind: str, name: str) -> PluginError:
        known = self._by_name[kind]
        near = did_you_mean(name, [other for other in known if ("/" in other) == ("/" in name)])
        kinds = [other for other, table in self._by_name.items() if other != kind and name in table]
        others = [f"{name!r} is {_a(other)}, not {_a(kind)}" for other in reversed(kinds)]
        hints = [*others, near, *self._lost_hints(name)]
        names = sorted({registered.qualified for registered in self.components(kind)})
        return PluginError(
            f"no {kind} is named {name!r}",
            accepted=", ".join(names) or f"nothing: no plugin offers a {kind}",
            hint="; ".join(dict.fromkeys(hint for hint in hints if hint)) or None,
        )

    def _lost_hints(self, name: str) -> list[str]:
        """Which plugins did not load that may hold `name`: all of them, or the one of its namespace."""
        namespace = name.partition("/")[0] if "/" in name else None
        lost = [plugin for plugin in self.plugins if plugin.status != "ok"]
        if namespace in (None, *(plugin.namespace for plugin in self.plugins)):
            return [_state(plugin) for plugin in lost if namespace in (None, plugin.namespace)]
        return [f"no plugin {namespace!r} is installed", *map(_state, lost)]

    def find(self, name: str) -> tuple[Registered, ...]:
        """The components of any kind that `name` may stand for. PluginError when there is none."""
        tables = self._by_name.values()
        if found := tuple(r for table in tables for r in table.get(name, ())):
            return found
        known = {other for table in tables for other in table if ("/" in other) == ("/" in name)}
        hints = filter(None, [did_you_mean(name, sorted(known)), *self._lost_hints(name)])
        raise PluginError(f"no component is named {name!r}", hint="; ".join(hints) or None)

    def fingerprint_table(self) -> dict[str, str]:
        """One line a plugin that is not disabled: distribution, version, status, hash of its components."""
        return {
            f"{plugin.namespace} ({plugin.distribution})": (
                f"{plugin.version}, {plugin.status}, components {_digest(_component_rows(plugin))[:8]}"
            )
            for plugin in self.plugins
            if plugin.status != "disabled"
        }


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _state(plugin: PluginRecord) -> str:
    words = {"failed": "failed to load", "refused": "was refused", "disabled": "is disabled"}
    return f"{plugin.label} {words[plugin.status]}: {plugin.error}"


def _component_rows(plugin: PluginRecord) -> list[str]:
    offers = [(r.kind, r.component) for r in plugin.components]
    rows = [[kind, c.name, c.target, c.config, sorted(c.aliases), dict(c.capabilities)] for kind, c in offers]
    return sorted(json.dumps(row, default=_plain) for row in rows)


def _plain(value: object) -> object:
    """What JSON does not know, the same in every process: a set has no order, an object an address."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def get_registry(local_paths: Sequence[str] = (), stored: Collection[str] = ()) -> Registry:
    """The registry of the installed plugins, with the one-file plugins of `local_paths`.

    A run has one, that of its config (`RunConfig.registry`). Plugins that are imported stay imported, so that
    another registry costs milliseconds.

    Args:
        local_paths: the files.
        stored: those of them that a stored run names, and that nothing has allowed. TrustError for one that
            this user has not trained with.

    Raises:
        PluginError: a named file does not load; under MM_PLUGINS_STRICT, any plugin. Otherwise a broken
            plugin is one line on stderr, once a process, on the first rank only.
    """
    registry = Registry(discover(local_files(local_paths, stored), os.environ))
    _raise_if_needed(registry.plugins)
    _report(registry.plugins)
    return registry


def build(kind: str, config: ComponentConfig | Mapping[str, Any] | str, *args: Any) -> Any:
    """Builds a component of an installed plugin: `build("scheduler", {"type": "flow_match", "shift": 5.0})`.

    What a run's config names is built by its own registry: `config.registry.build("task", config.task)`.
    See `Registry.build`.
    """
    return get_registry().build(kind, config, *args)


def survey(local_paths: tuple[str, ...] = ()) -> Registry:
    """A registry for looking at plugins: nothing is reported, and broken plugins stop nothing."""
    return Registry(discover(local_files(local_paths), os.environ))


def clear_cache() -> None:
    """Forgets which plugins are installed and what was told of them (imports stay)."""
    _tell.cache_clear()
    entry_point_records.cache_clear()


def _report(plugins: tuple[PluginRecord, ...]) -> None:
    """Tells a person once, on the first rank only: a line for each broken plugin, and for each that imports
    torch."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return
    for plugin in plugins:
        if plugin.broken:
            _tell(_state(plugin))
    for plugin in plugins:
        if plugin.imports_torch and plugin.file is None:
            what = f"{plugin.label} imports torch when it is listed, which makes every command slow"
            _tell(f"{what}: import it in the target's module only")


@cache
def _tell(line: str) -> None:
    sys.stderr.write(f"mm: warning: {line}\n")


def _raise_if_needed(plugins: tuple[PluginRecord, ...]) -> None:
    strict = os.environ.get("MM_PLUGINS_STRICT", "")
    if strict not in ("", "0", "1"):
        raise PluginError(f"the value {strict!r} is neither 0 nor 1", where="MM_PLUGINS_STRICT")
    if strict == "1" and (broken := [plugin for plugin in plugins if plugin.broken]):
        raise PluginError(
            "; ".join(map(_state, broken)),
            where="MM_PLUGINS_STRICT=1",
            hint="`mm plugins check` lists every fault",
        )
    # A config that names a file needs it.
    if broken := [plugin for plugin in plugins if plugin.broken and plugin.file is not None]:
        raise PluginError(
            "; ".join(f"{plugin.error}" for plugin in broken),
            where="plugins.path",
            hint="`mm plugins check --path FILE` looks at such a file alone",
        )
