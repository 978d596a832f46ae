"""Conformance checks of shipped components, and of faulty classes in their place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from mm_core.plugin.registry import Registry, get_registry
from mm_core.testing.kit import Examination, Outcome
from mm_core.testing.suite import find_components


def examined(
    name: str,
    faulty: type | None = None,
    *,
    tiny: Mapping[str, object] | str | None = None,
    config: str | None = "",
    ranks: bool = True,
    capabilities: Mapping[str, object] | None = None,
) -> Examination:
    """The examination of a shipped component.

    Args:
        name: its name.
        faulty: a class in place of its own.
        tiny: fields of its small instance, instead of its own.
        config: its config; None: from the signature of `faulty`.
        ranks: also the checks that start several processes.
        capabilities: instead of its own.
    """
    registry = get_registry()
    (registered,) = find_components(registry, name)
    component = registered.component
    if faulty is not None:
        module = ModuleType(f"faulty_{faulty.__name__.lower()}")
        setattr(module, faulty.__name__, faulty)
        sys.modules[module.__name__] = module
        component = replace(component, target=f"{module.__name__}:{faulty.__name__}")
    component = replace(component, tiny=component.tiny if tiny is None else tiny)
    if capabilities is not None:
        component = replace(component, capabilities=capabilities)
    component = component if config == "" else replace(component, config=config)
    changed = replace(registered, component=component)
    plugins = [
        replace(
            plugin, components=tuple(changed if each is registered else each for each in plugin.components)
        )
        for plugin in registry.plugins
    ]
    return Examination(changed, Registry(tuple(plugins)), ranks)


def edited(good: Path, folder: Path, kind: str, old: str = "", new: str = "") -> Examination:
    """The examination of `local/good` in a one-file plugin with a line replaced.

    Args:
        good: the plugin.
        folder: an empty folder for the changed one.
        kind: of the component.
        old: what is replaced; it occurs once.
        new: what takes its place.
    """
    text = good.read_text()
    assert text.count(old) == 1 or not old, old
    file = folder / good.name
    file.write_text(text.replace(old, new) if old else text)
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/good", kind)
    return Examination(registered, registry)


def failed(of: Examination, names: Iterable[str]) -> dict[str, Outcome]:
    """The checks that fail, by name."""
    return {name: outcome for name in names if (outcome := of.run(name)).status == "failed"}


def refusal(name: str, check: str, faulty: type, **options: object) -> str:
    """The error with which a check refuses a faulty class in place of a shipped component's."""
    outcome = examined(name, faulty, **options).run(check)
    assert outcome.status in ("failed", "expected"), f"{check} {outcome.status}: {outcome.reason}"
    return outcome.reason


def shortcomings(name: str, ranks: bool = True) -> list[str]:
    """The checks that a shipped component fails, with their errors."""
    return [f"{o.check}: {o.reason}" for o in examined(name, ranks=ranks) if o.status == "failed"]
