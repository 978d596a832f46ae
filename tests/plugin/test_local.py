"""One-file plugins that a config names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from mm_core.errors import PluginError
from mm_core.plugin import ComponentConfig, build

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class Config:
    depth: int = {depth}


class MyDiT:
    def __init__(self, depth: int) -> None:
        self.depth = depth


@hookimpl
def mm_predictors():
    return [Component(name="{name}", target="{module}:MyDiT", config="{module}:Config")]
"""


def write(path: Path, name: str = "my_dit", depth: int = 4) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(SOURCE.format(name=name, depth=depth, module=path.stem))
    return str(path)


def test_a_file_registers_under_local_and_its_targets_import(site: Any, tmp_path: Path) -> None:
    registry = site.registry(write(tmp_path / "my_dit.py"))
    registered = registry.resolve("predictor", "local/my_dit")
    assert registry.resolve("predictor", "my_dit") is registered
    assert registered.config_class()().depth == 4
    model = registered.load_target()(depth=2)
    assert model.depth == 2
    assert pickle.loads(pickle.dumps(model)).depth == 2  # its module can be found by name


@pytest.mark.usefixtures("toys")
def test_a_registry_builds_what_its_own_files_hold(site: Any, tmp_path: Path) -> None:
    section = ComponentConfig("predictor", "local/my_dit")
    first = site.registry(write(tmp_path / "a/my_dit.py", depth=7))
    second = site.registry(write(tmp_path / "b/my_dit.py", depth=3))
    assert (first.build("predictor", section).depth, second.build("predictor", section).depth) == (7, 3)
    with pytest.raises(PluginError, match="no plugin 'local' is installed"):
        build("predictor", section)  # that of the installed plugins


def test_the_version_is_the_content(site: Any, tmp_path: Path) -> None:
    one = site.registry(write(tmp_path / "a" / "my_dit.py", depth=1))
    same = site.registry(write(tmp_path / "b" / "my_dit.py", depth=1))
    other = site.registry(write(tmp_path / "c" / "my_dit.py", depth=2))
    assert (
        one.fingerprint_table() == same.fingerprint_table()
    )  # another folder on another machine is no difference
    assert one.fingerprint_table() != other.fingerprint_table()
    changed = site.registry(write(tmp_path / "a" / "my_dit.py", depth=9))  # as a notebook's user would
    assert changed.resolve("predictor", "my_dit").config_class()().depth == 9
    assert one.resolve("predictor", "my_dit").distribution == "my_dit.py"
    assert one.resolve("predictor", "my_dit").version.startswith("sha256:")


def test_files_of_one_stem_live_side_by_side(site: Any, tmp_path: Path) -> None:
    registry = site.registry(
        write(tmp_path / "a" / "dit.py", "first", 1), write(tmp_path / "b" / "dit.py", "second", 2)
    )
    depths = [registry.resolve("predictor", name).config_class()().depth for name in ("first", "second")]
    assert depths == [1, 2]


def test_two_files_that_define_one_name_are_an_error(site: Any, tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.py"), write(tmp_path / "two.py")
    with pytest.raises(PluginError, match=f"the predictor 'local/my_dit' is defined by {one} and {two}"):
        site.registry(one, two)
    twice = site.registry(one, one)  # the same file twice is one file
    assert [p.file for p in twice.plugins if p.namespace == "local"] == [one]


def test_a_file_that_is_missing_is_an_error(site: Any, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.py"
    with pytest.raises(PluginError) as caught:
        site.registry(str(path))
    assert str(caught.value) == (
        f"plugins.path: plugin file {str(path)!r} cannot be read: No such file or directory\n"
        "  hint: `mm plugins check --path FILE` checks one such file"
    )


def test_a_file_that_breaks_is_an_error_because_the_config_asks_for_it(
    site: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my_dit.py"
    path.write_text("x = 1\n1 / 0\n")
    with pytest.raises(PluginError, match=rf"ZeroDivisionError: division by zero \({path}, line 2\)"):
        site.registry(str(path))
    assert capsys.readouterr().err == ""  # said once, by the error
    write(path)
    assert site.registry(str(path)).resolve("predictor", "my_dit").namespace == "local"


@pytest.mark.parametrize("name", ["my-dit.py", "my_dit.txt"])
def test_a_file_must_be_named_like_a_module(site: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("")
    with pytest.raises(PluginError, match="must be named like a Python module: use letters, digits and '_'"):
        site.registry(str(path))


def test_a_file_may_import_torch_without_a_warning(site: Any, tmp_path: Path) -> None:
    write(tmp_path / "my_dit.py")
    path = tmp_path / "my_dit.py"
    path.write_text(path.read_text().replace("from dataclasses", "import torch\nfrom dataclasses"))
    code = "import sys, mm_core.plugin as p; print(p.get_registry((sys.argv[1],)).plugins[-1].imports_torch)"
    done = site.run("-c", code, str(path))
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.usefixtures("toys")
def test_another_runs_config_does_not_take_a_runs_plugins_away(site: Any, tmp_path: Path) -> None:
    """As in a script that trains and reads the config of another run meanwhile."""
    ours = site.registry(write(tmp_path / "ours.py", "ours"))
    section = ComponentConfig("predictor", "local/ours")
    assert ours.resolve("predictor", "local/ours").config_class()().depth == 4
    site.registry(write(tmp_path / "theirs.py", "theirs"))
    assert ours.build("predictor", section).depth == 4
