"""The conformance checks of plugins as a pytest test."""

from __future__ import annotations

from collections.abc import Callable

from mm_core.plugin.registry import get_registry
from mm_core.testing.kit import Examination, find_components


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
