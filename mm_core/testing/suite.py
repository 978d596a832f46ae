"""The components that are tested, and their conformance checks as a pytest test."""

from __future__ import annotations

from collections.abc import Callable

from packaging.utils import canonicalize_name

from mm_core.errors import PluginError
from mm_core.plugin.records import Registered
from mm_core.plugin.registry import Registry, get_registry
from mm_core.testing.kit import Examination


def conformance_tests(*names: str, kind: str | None = None, ranks: bool = True) -> Callable[..., None]:
    """A test function with one case for each conformance check of each component.

    Assign it to a name that begins with `test_`. A check that does not apply is skipped with its reason; one
    that the component's `expected_failures` name is an expected failure.

    Args:
        names: plugins or components, as for `mm plugins test`.
        kind: only components of this kind.
        ranks: also the checks that start several processes.

    Raises:
        PluginError: there is no such component, or its plugin does not load.
    """
    import pytest

    registry = get_registry()
    cases = []
    for name in names:
        for registered in find_components(registry, name, kind):
            examination = Examination(registered, registry, ranks)
            place = f"{registered.kind}-{registered.qualified}"
            cases += [pytest.param(examination, check, id=f"{place}-{check}") for check in examination.checks]

    @pytest.mark.parametrize(("examination", "check"), cases)
    def test(examination: Examination, check: str) -> None:
        outcome = examination.run(check)
        if outcome.status == "not applicable":
            pytest.skip(outcome.reason)
        if outcome.status == "expected":
            pytest.xfail(outcome.reason)
        if outcome.status == "failed":
            pytest.fail(outcome.reason, pytrace=False)

    return test


def find_components(registry: Registry, name: str, kind: str | None = None) -> tuple[Registered, ...]:
    """The components of a plugin, or the components of a name.

    Args:
        registry: the plugins.
        name: namespace or distribution of a plugin, or the name of a component.
        kind: only components of this kind.

    Raises:
        PluginError: there is none, or the plugin did not load.
    """
    named = [
        plugin
        for plugin in registry.plugins
        if name == plugin.namespace or canonicalize_name(name) == canonicalize_name(plugin.distribution or "")
    ]
    for plugin in named:
        if plugin.status != "ok":
            raise PluginError(
                f"{plugin.label} {plugin.status}: {plugin.error}", hint="`mm plugins check` lists every error"
            )
    components = tuple(c for plugin in named for c in plugin.components) or registry.find(name)
    if chosen := tuple(c for c in components if kind in (None, c.kind)):
        return chosen
    kinds = ", ".join(sorted({c.kind for c in components}))
    raise PluginError(f"{name!r} has no component of the kind {kind!r}", accepted=kinds or "no kind")
