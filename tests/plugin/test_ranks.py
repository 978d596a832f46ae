"""All ranks must have the same plugins; the error names the ranks and what differs."""

from __future__ import annotations

from typing import Any

import pytest

from mm_core.errors import PluginError
from mm_core.plugin.ranks import check_ranks_agree

A = {"core (mm-core)": "0.1.0, ok, components aaaa", "dit (mm-dit)": "1.0, ok, components bbbb"}
B = {**A, "dit (mm-dit)": "1.1, ok, components cccc"}
C = {"core (mm-core)": "0.1.0, ok, components aaaa"}


def test_equal_tables_agree() -> None:
    check_ranks_agree([A, dict(A), dict(reversed(A.items()))])
    check_ranks_agree([A])


def test_the_few_are_named_and_what_they_have() -> None:
    with pytest.raises(PluginError) as caught:
        check_ranks_agree([B, A, A, A, C, C])
    assert str(caught.value) == (
        "ranks 0, 4-5 of 6 have different plugins from the rest: "
        "dit (mm-dit): 1.1, ok, components cccc on rank 0; "
        "1.0, ok, components bbbb on ranks 1-3; not loaded on ranks 4-5\n"
        "  accepted: the same plugins in the same versions on all ranks\n"
        "  hint: compare `mm plugins list` on the machines of these ranks"
    )


def test_of_two_rank_0_is_the_measure() -> None:
    with pytest.raises(PluginError, match=r"^rank 1 of 2 has different plugins from the rest"):
        check_ranks_agree([A, B])


def test_a_plugin_that_failed_on_one_rank_differs(site: Any) -> None:
    site.good("alpha")
    good = site.registry()
    (site.folder / "mm_alpha" / "plugin.py").write_text("1 / 0  # a line longer than before")
    import sys

    del sys.modules["mm_alpha.plugin"]
    bad = site.registry()
    with pytest.raises(
        PluginError, match=r"alpha \(mm-alpha\): 1.0, ok, .* on rank 0; 1.0, failed, .* on rank 1"
    ):
        check_ranks_agree([good.fingerprint_table(), bad.fingerprint_table()])


def test_the_fingerprint_is_the_same_in_every_process_and_changes_with_the_components(site: Any) -> None:
    source = (
        "from mm_core import Component, hookimpl\n@hookimpl\ndef mm_predictors():\n"
        "    return [Component(name='dit', target='m:DiT',"
        " capabilities={'tasks': {'t2v', 'i2v', 'v2v'}, 'o': object()})]\n"
    )
    site.plugin("alpha", source)
    code = "from mm_core.plugin import get_registry; print(get_registry().fingerprint_table())"
    prints = {site.run("-c", code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
    assert len(prints) == 1
    assert prints != {""}
    # Of another size: within a second, bytecode of a file of the same size is taken for its own.
    (site.folder / "mm_alpha" / "plugin.py").write_text(source.replace("'v2v'", "'audio'"))
    assert site.run("-c", code).stdout not in prints
