"""Every hook of a plugin is checked; a wrong one fails that plugin, and the message gives the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mm_core.plugin import hookspecs
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.registry import PluginRecord

HEAD = "from mm_core import Component, hookimpl\nc = Component(name='dit', target='m:DiT')\n"


def status(site: Any, source: str) -> PluginRecord:
    site.plugin("alpha", HEAD + source)
    (found,) = [plugin for plugin in site.registry().plugins if plugin.namespace == "alpha"]
    return found  # type: ignore[no-any-return]


def without_place(found: PluginRecord, site: Any) -> str:
    """The error of a plugin without its file, and the line where the hook begins."""
    file = re.escape(str(site.folder / "mm_alpha" / "plugin.py"))
    return re.sub(rf" \({file}(, line 3)?\)$", "", found.error or "")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "@hookimpl\ndef mm_predictor(): return [c]\n@hookimpl\ndef mm_dataset(): return []",
            "there is no hook 'mm_predictor': did you mean 'mm_predictors'?; "
            "there is no hook 'mm_dataset': did you mean 'mm_datasets' or 'mm_tasks'?",
        ),
        (
            "def mm_predictors(): return [c]",
            "function 'mm_predictors' is not marked as a hook: put @hookimpl above it",
        ),
        (
            "def mm_predictrs(): return [c]",
            "function 'mm_predictrs' is not a hook: did you mean 'mm_predictors' or 'mm_metrics'?",
        ),
        (
            "def mm_zigzag(x): return x",
            "function 'mm_zigzag' is not a hook: names that start with mm_ are reserved for hooks",
        ),
        (
            "@hookimpl\ndef mm_predictors(config, registry): return [c]",
            "hook 'mm_predictors' takes no arguments: missing a required argument: 'config'",
        ),
        (
            "@hookimpl(specname='mm_predictrs')\ndef f(): return [c]",
            "there is no hook 'mm_predictrs': did you mean 'mm_predictors' or 'mm_metrics'?",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return None",
            "hook 'mm_predictors' returned None instead of a list of Component: return [Component(...), ...]",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return c",
            "hook 'mm_predictors' returned a Component instead of a list of Component: return"
            " [Component(...), ...]",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return 'dit'",
            "hook 'mm_predictors' returned a str instead of a list of Component: return"
            " [Component(...), ...]",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return [c, 'm:DiT']",
            "hook 'mm_predictors' returned a list that contains a str instead of a Component: write"
            " Component(name=..., target=...)",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return [c, c]",
            "two components of kind predictor have the name or alias 'dit' ('dit' and 'dit'): rename one",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return [c, Component(name='b', target='m:B', aliases=('dit',))]",
            "two components of kind predictor have the name or alias 'dit' ('dit' and 'b'): rename one",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return [Component(name='a/b', target='m:B')]",
            "hook 'mm_predictors' failed: the component name 'a/b' is not valid; accepted: "
            "letters, digits, '_', '-', '.' (the core adds the namespace)",
        ),
        (
            "@hookimpl\ndef mm_predictors(): return [Component(name='b', target='m.B')]",
            "hook 'mm_predictors' failed: component 'b': target 'm.B' is not an import path; accepted: "
            "'package.module:Name'",
        ),
    ],
)
def test_a_wrong_hook_fails_the_plugin(site: Any, source: str, sentence: str) -> None:
    found = status(site, source)
    assert (found.status, without_place(found, site)) == ("failed", sentence)
    assert found.components == ()


def test_a_hook_that_raises_fails_the_plugin_with_its_place(site: Any) -> None:
    found = status(site, "@hookimpl\ndef mm_predictors():\n    yield c\n    raise KeyError('gone')")
    assert found.status == "failed"
    assert found.error == (
        f"hook 'mm_predictors' failed: KeyError: 'gone' ({site.folder / 'mm_alpha' / 'plugin.py'}, line 6)"
    )


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused_and_never_run(site: Any, option: str) -> None:
    found = status(site, f"@hookimpl({option}=True)\ndef mm_predictors():\n    yield\n    return []")
    assert (found.status, without_place(found, site)) == (
        "refused",
        "hook 'mm_predictors' is a wrapper, which could change the components of other plugins: make it a"
        " plain hook",
    )


def test_one_bad_hook_takes_the_good_ones_of_its_plugin_along(site: Any) -> None:
    found = status(
        site, "@hookimpl\ndef mm_predictors(): return [c]\n@hookimpl\ndef mm_schedulers(): return [1]"
    )
    assert found.status == "failed"
    assert found.components == ()


@pytest.mark.parametrize(
    "source",
    [
        "@hookimpl\ndef mm_predictors(): yield c",
        "@hookimpl\ndef mm_predictors(): return (c,)",
        "@hookimpl(specname='mm_predictors')\ndef anything(): return [c]",
        "@hookimpl(tryfirst=True)\ndef mm_predictors(): return [c]",
        "@hookimpl\ndef mm_predictors(depth=3): return [c]",
        # For a kind that a later core knows: its author says that it may be unknown here.
        "@hookimpl(optionalhook=True)\ndef mm_oracles(): pass\n@hookimpl\ndef mm_predictors(): return [c]",
        # An imported function is somebody else's.
        "from os.path import join as mm_join\n@hookimpl\ndef mm_predictors(): return [c]",
    ],
)
def test_what_is_right_registers(site: Any, source: str) -> None:
    found = status(site, source)
    assert (found.status, found.error) == ("ok", None)
    assert [c.qualified for c in found.components] == ["alpha/dit"]


def test_one_name_may_stand_in_two_kinds(site: Any) -> None:
    found = status(
        site, "@hookimpl\ndef mm_predictors(): return [c]\n@hookimpl\ndef mm_schedulers(): return [c]"
    )
    assert {c.kind for c in found.components} == {"predictor", "scheduler"}


def test_every_kind_has_a_documented_hook_and_every_hook_a_kind() -> None:
    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("mm_")}
    assert set(hooks) == set(KINDS.values())
    for name, hook in hooks.items():
        assert "target(" in (hook.__doc__ or ""), f"{name} does not say how the core calls its targets"


def test_every_kind_is_used_by_a_real_plugin() -> None:
    from mm_core.plugin.registry import survey

    registry = survey()
    assert [kind for kind in KINDS if not registry.components(kind)] == []
