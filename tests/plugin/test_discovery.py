"""Plugins are found by entry points; an error in one is readable and affects no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pluggy
import pytest

import mm_core
from mm_core.config.shipped import find_shipped
from mm_core.errors import ConfigError, MMError, PluginError
from mm_core.interchange import migration_of
from mm_core.plugin.registry import PluginRecord, Registry, get_registry

HEAD = "from mm_core import Component, hookimpl\n\n"


def record(registry: Registry, namespace: str) -> PluginRecord:
    (found,) = [plugin for plugin in registry.plugins if plugin.namespace == namespace]
    return found


def test_an_installed_plugin_is_found_with_its_distribution(site: Any) -> None:
    site.good("alpha", version="2.5")
    registry = site.registry()
    alpha = record(registry, "alpha")
    assert (alpha.status, alpha.distribution, alpha.version, alpha.requirement) == (
        "ok",
        "mm-alpha",
        "2.5",
        "mm-core>=0.1,<0.2",
    )
    (registered,) = alpha.components
    assert registered.qualified == "alpha/dit"
    assert [registry.resolve("predictor", n) for n in ("dit", "alpha/dit", "old_dit", "alpha/old_dit")] == [
        registered
    ] * 4


def test_the_core_is_a_plugin_like_any_other_and_comes_first(site: Any) -> None:
    site.good("aaa")
    registry = site.registry()
    assert registry.plugins[0].namespace == "core"
    assert registry.plugins[0].module == "mm_core.builtin.plugin"
    assert registry.resolve("engine", "fsdp2").qualified == "core/fsdp2"


def test_discovery_imports_neither_targets_nor_configs(site: Any) -> None:
    site.good("alpha")
    site.registry()
    assert "mm_alpha.plugin" in sys.modules
    assert "mm_alpha.model" not in sys.modules
    assert "mm_alpha.config" not in sys.modules


def test_run_from_a_source_tree_without_metadata_the_core_is_there(site: Any) -> None:
    # -S: no site-packages, -P: no working directory, so that no metadata of mm-core is seen.
    (site.folder / "mm_core").symlink_to(Path(mm_core.__file__).parent)
    (site.folder / "pluggy").symlink_to(Path(pluggy.__file__).parent)
    code = (
        "import importlib.metadata as m\n"
        "try: m.version('mm-core'); raise SystemExit('metadata was found')\n"
        "except m.PackageNotFoundError: pass\n"
        "from mm_core.plugin.registry import get_registry\n"
        "p, = get_registry().plugins\n"
        "print(p.namespace, p.distribution, p.status, len(p.components) > 5)"
    )
    done = site.run("-S", "-P", "-c", code)
    assert done.stdout == "core mm-core ok True\n", done.stderr


def test_two_distributions_that_claim_one_name_are_both_refused(site: Any) -> None:
    site.plugin("one", HEAD)
    site.add("mm-other", {"one": "mm_one.plugin"}, version="3.0")
    site.good("bystander")
    registry = site.registry()
    ones = [plugin for plugin in registry.plugins if plugin.namespace == "one"]
    assert [plugin.status for plugin in ones] == ["refused", "refused"]
    assert {plugin.error for plugin in ones} == {
        "the entry-point name 'one' is claimed by mm-one 1.0 (mm_one.plugin) and "
        "mm-other 3.0 (mm_one.plugin): uninstall one"
    }
    assert "mm_one.plugin" not in sys.modules
    assert record(registry, "bystander").status == "ok"


@pytest.mark.parametrize("name", ["core", "local"])
def test_reserved_names_are_refused_and_the_core_stays(site: Any, name: str) -> None:
    site.add("mm-thief", {name: "mm_thief"}, {"mm_thief": HEAD})
    registry = site.registry()
    (thief,) = [plugin for plugin in registry.plugins if plugin.distribution == "mm-thief"]
    assert (thief.status, thief.error) == ("refused", f"the entry-point name {name!r} is reserved")
    assert registry.resolve("optimizer", "core/adamw").distribution == "mm-core"


def test_a_name_that_is_no_namespace_is_refused(site: Any) -> None:
    site.add("mm-odd", {"Odd/Name": "mm_odd"}, {"mm_odd": HEAD})
    assert record(site.registry(), "Odd/Name").error == (
        "the entry-point name 'Odd/Name' is not valid: use lower-case letters, digits, '_', '-' and '.'"
    )


def test_an_entry_point_must_be_a_module(site: Any) -> None:
    site.add("mm-odd", {"odd": "mm_odd:plugin"}, {"mm_odd": HEAD})
    assert record(site.registry(), "odd").error == (
        "the entry point 'mm_odd:plugin' must name a module: write 'mm_odd'"
    )


def test_one_module_under_two_names_registers_once(site: Any) -> None:
    site.add("mm-twin", {"twin_a": "mm_twin", "twin_b": "mm_twin"}, {"mm_twin": HEAD})
    registry = site.registry()
    assert record(registry, "twin_a").status == "ok"
    assert record(registry, "twin_b").error == (
        "the entry points 'twin_a' and 'twin_b' name the same module 'mm_twin';"
        " hint: uninstall one of the two plugins: this one comes from mm-twin"
    )


def test_a_plugin_for_another_core_is_refused_before_its_import(site: Any) -> None:
    site.plugin("future", "raise RuntimeError('imported')", requires=["torch", "mm-core (>=0.2,<0.3)"])
    future = record(site.registry(), "future")
    assert future.status == "refused"
    assert future.error == f"it requires 'mm-core (>=0.2,<0.3)', but this is mm-core {mm_core.__version__}"
    assert "mm_future" not in sys.modules


def test_a_requirement_behind_a_marker_or_an_extra_does_not_count(site: Any) -> None:
    site.good(
        "extra", requires=["mm-core>=5; extra == 'new'", "mm-core>=7; python_version < '3'", "mm-core-x>=9"]
    )
    assert record(site.registry(), "extra").status == "ok"


def test_a_requirement_that_is_none_is_refused(site: Any) -> None:
    site.good("typo", requires=["mm-core >=>= 0.1"])
    assert record(site.registry(), "typo").error == (
        f"it requires 'mm-core >=>= 0.1', but this is mm-core {mm_core.__version__}"
    )


def test_a_plugin_that_does_not_import_is_one_line_and_the_rest_works(
    site: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("broken", "import json\n\nimport no_such_library\n")
    site.good("alpha")
    registry = site.registry()
    broken = record(registry, "broken")
    file = site.folder / "mm_broken" / "plugin.py"
    assert broken.status == "failed"
    assert broken.error == (
        "import of mm_broken.plugin failed: ModuleNotFoundError: No module named 'no_such_library' "
        f"({file}, line 3)"
    )
    assert registry.resolve("predictor", "dit").qualified == "alpha/dit"
    line = f"mm: warning: plugin 'broken' (mm-broken 1.0) failed to load: {broken.error}\n"
    assert capsys.readouterr().err == line
    get_registry(())  # a second look says nothing more
    assert capsys.readouterr().err == ""


def test_other_ranks_are_quiet(
    site: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("broken", "1 / 0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert record(site.registry(), "broken").status == "failed"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError: invalid syntax ("),
        ("raise ValueError('two\\nlines')", "ValueError: two"),
    ],
)
def test_whatever_an_import_raises_stays_one_line(site: Any, source: str, error: str) -> None:
    site.plugin("broken", source)
    found = record(site.registry(), "broken")
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.startswith(f"import of mm_broken.plugin failed: {error}")
    assert "\n" not in found.error


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_damaged_metadata_harms_no_other(site: Any, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site.good("alpha")
    site.plugin("torn", HEAD)
    shadowed = site.folder.parent / "shadowed"  # later on sys.path: another mm-alpha, which does not count
    shadowed.mkdir()
    type(site)(shadowed).good("alpha", version="0.5")
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed)])
    (site.folder / "mm_torn-1.0.dist-info" / file).write_bytes(b"[mm_core.plugins]\nName: \xff\xfe")
    registry = site.registry()
    (torn,) = [plugin for plugin in registry.plugins if "torn" in plugin.namespace]
    assert torn.status == "failed"
    assert torn.error is not None
    assert "mm_torn-1.0.dist-info cannot be read: UnicodeDecodeError" in torn.error
    assert registry.resolve("predictor", "dit").namespace == "alpha"
    assert registry.resolve("optimizer", "adamw").namespace == "core"


def test_a_plugin_that_imports_torch_is_named(site: Any) -> None:
    site.plugin("heavy", "import torch\n" + HEAD)
    done = site.run("-c", "from mm_core.plugin.registry import get_registry; get_registry()")
    assert done.stderr == (
        "mm: warning: plugin 'heavy' (mm-heavy 1.0) imports torch when it is loaded, which makes every "
        "command slow: import torch only in the target's module\n"
    )


def test_not_found_names_near_names_and_the_plugins_that_failed(site: Any) -> None:
    site.good("alpha")
    site.plugin("broken", "1 / 0")
    with pytest.raises(PluginError) as caught:
        site.registry().resolve("predictor", "dti")
    text = str(caught.value)
    assert text.startswith("no predictor is named 'dti'\n  accepted: alpha/dit")
    assert "did you mean 'dit'?" in text
    assert (
        "plugin 'broken' (mm-broken 1.0) failed to load: import of mm_broken.plugin failed: ZeroDivision"
        in text
    )


def test_a_name_in_a_failed_namespace_names_only_that_plugin(site: Any) -> None:
    site.plugin("broken", "1 / 0")
    site.plugin("worse", "1 / 0")
    with pytest.raises(PluginError) as caught:
        site.registry().resolve("predictor", "broken/dit")
    assert "plugin 'broken' (mm-broken 1.0) failed to load" in str(caught.value)
    assert "worse" not in str(caught.value)


def test_not_found_names_a_plugin_that_is_not_installed_and_a_kind_that_differs(site: Any) -> None:
    registry = site.registry()
    with pytest.raises(PluginError, match="no plugin 'absent' is installed"):
        registry.resolve("predictor", "absent/dit")
    with pytest.raises(PluginError, match="'adamw' is an optimizer, not a predictor"):
        registry.resolve("predictor", "adamw")
    with pytest.raises(
        PluginError, match=r"(?s)there is no kind of component named 'optimiser'.*did you mean 'optimizer'"
    ):
        registry.resolve("optimiser", "adamw")


def test_a_bare_name_of_two_plugins_is_ambiguous_only_when_used(site: Any) -> None:
    site.good("alpha")
    site.good("beta")
    registry = site.registry()
    assert registry.resolve("predictor", "beta/dit").namespace == "beta"
    for name in ("dit", "old_dit"):
        with pytest.raises(PluginError) as caught:
            registry.resolve("predictor", name)
        assert str(caught.value) == (
            f"the predictor name {name!r} is ambiguous: 2 plugins provide one\n"
            "  accepted: alpha/dit, beta/dit\n"
            "  hint: write the qualified name"
        )


def test_a_bare_name_of_the_core_stays_the_cores_whatever_is_installed(site: Any) -> None:
    site.plugin(
        "alpha",
        "from mm_core import Component, hookimpl\n"
        "@hookimpl\n"
        "def mm_schedulers():\n"
        "    return [Component(name='flow_match', target='mm_alpha.flow:Flow')]\n",
    )
    registry = site.registry()
    assert registry.resolve("scheduler", "flow_match").qualified == "core/flow_match"
    assert registry.resolve("scheduler", "alpha/flow_match").namespace == "alpha"


def test_the_allow_list_keeps_the_core(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.good("alpha")
    site.good("beta")
    monkeypatch.setenv("MM_PLUGINS", "alpha")
    registry = site.registry()
    assert [record(registry, n).status for n in ("core", "alpha", "beta")] == ["ok", "ok", "disabled"]
    assert record(registry, "beta").error == "not in MM_PLUGINS=alpha"
    assert "mm_beta" not in sys.modules
    with pytest.raises(
        PluginError, match=r"plugin 'beta' \(mm-beta 1.0\) is disabled: not in MM_PLUGINS=alpha"
    ):
        registry.resolve("predictor", "beta/dit")
    monkeypatch.setenv("MM_PLUGINS", "")
    assert {p.namespace for p in get_registry().plugins if p.status == "ok"} == {"core"}


def test_disabled_plugins_are_not_imported_and_break_nothing(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("broken", "1 / 0")
    monkeypatch.setenv("MM_PLUGINS_DISABLE", "broken")
    monkeypatch.setenv("MM_PLUGINS_STRICT", "1")
    assert record(site.registry(), "broken").error == "in MM_PLUGINS_DISABLE=broken"


@pytest.mark.parametrize("variable", ["MM_PLUGINS", "MM_PLUGINS_DISABLE"])
def test_lists_that_name_an_absent_plugin_are_errors(
    site: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    site.good("alpha")
    monkeypatch.setenv(variable, "alhpa")
    with pytest.raises(PluginError) as caught:
        site.registry()
    assert str(caught.value).startswith(f"{variable}=alhpa: no plugin 'alhpa' is installed")
    assert "did you mean 'alpha'?" in str(caught.value)


def test_the_core_cannot_be_switched_off(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_PLUGINS_DISABLE", "core")
    with pytest.raises(PluginError, match="MM_PLUGINS_DISABLE: the plugin 'core' cannot be disabled"):
        site.registry()


def test_strict_makes_a_broken_plugin_fatal(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("broken", "1 / 0")
    monkeypatch.setenv("MM_PLUGINS_STRICT", "1")
    with pytest.raises(
        PluginError, match=r"MM_PLUGINS_STRICT=1: plugin 'broken' \(mm-broken 1.0\) failed to load"
    ):
        site.registry()
    monkeypatch.setenv("MM_PLUGINS_STRICT", "0")
    assert record(get_registry(), "broken").status == "failed"
    monkeypatch.setenv("MM_PLUGINS_STRICT", "maybe")
    with pytest.raises(
        PluginError, match="MM_PLUGINS_STRICT: 'maybe' is not a valid value\n  accepted: 0 or 1"
    ):
        get_registry()


def test_a_plugin_with_one_predictor_takes_twelve_lines() -> None:
    import mm_custom_dit.plugin

    first, _, _ = Path(mm_custom_dit.plugin.__file__).read_text().partition("\n\n\n@hookimpl\ndef mm_weight")
    assert "mm_predictors" in first and len(first.splitlines()) <= 12


@pytest.mark.parametrize("name", ["custom_dit", "custom_dit/custom_dit"])
def test_a_plugin_of_the_repository_that_is_not_installed_is_named(name: str, tmp_path: Path) -> None:
    core = tuple(plugin for plugin in get_registry().plugins if plugin.namespace == "core")
    with pytest.raises(PluginError) as caught:
        Registry(core).resolve("predictor", name)
    install = "the plugin mm-custom-dit is not installed: pip install ./plugins/mm_custom_dit"
    assert install in str(caught.value)
    with pytest.raises(ConfigError) as missing:
        find_shipped(f"{name}/quickstart", core)
    assert install in str(missing.value)
    with pytest.raises(MMError, match="no installed migration recognises") as strange:
        migration_of(Registry(core), [tmp_path])
    assert "mm-trainers is not installed: pip install ./plugins/mm_trainers" in str(strange.value)
