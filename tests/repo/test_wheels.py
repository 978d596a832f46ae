"""Wheels for users contain all required files and no others, and never replace torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import mm_core
from mm_core.device.kind import NEWEST_TORCH
from support.scripts import script

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [
    tomllib.loads(file.read_text())["project"]
    for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
]
CORE, *PLUGINS = PROJECTS


wheels_check = script("tests/repo/wheels.py")


@pytest.mark.parametrize("name", [project["name"] for project in PROJECTS])
def test_a_wheel_carries_its_package_and_nothing_else(wheels: dict[str, Path], name: str) -> None:
    assert wheels_check.faults_of(wheels[name]) == []


def test_every_wheel_is_typed_and_the_plugin_wheel_brings_its_yamls(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            assert f"{name.replace('-', '_')}/py.typed" in archive.namelist()
    with zipfile.ZipFile(wheels["mm-custom-dit"]) as archive:
        yamls = {Path(name).name for name in archive.namelist() if name.endswith(".yaml")}
    assert {"quickstart.yaml", "real_clips.yaml", "t2v_1_3b.yaml"} <= yamls


def test_the_check_of_wheels_notices_what_is_missing_and_what_is_too_much(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    spoilt = tmp_path / wheels["mm-core"].name
    with zipfile.ZipFile(wheels["mm-core"]) as good, zipfile.ZipFile(spoilt, "w") as bad:
        for name in good.namelist():
            if name != "mm_core/py.typed" and "LICENSE" not in name:
                bad.writestr(name, good.read(name))
        bad.writestr("tests/test_x.py", "")
    assert wheels_check.faults_of(spoilt) == [
        "mm_core/py.typed is missing",
        "tests/test_x.py does not belong into a wheel",
        "LICENSE is missing",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [project["name"] for project in PROJECTS])
def test_installing_replaces_no_package_of_torch(wheels: dict[str, Path], tmp_path: Path, name: str) -> None:
    report = tmp_path / "report.json"
    others = [str(wheel) for other, wheel in wheels.items() if other != name]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--report", str(report)]
    subprocess.run([*command, str(wheels[name]), *others], check=True, stdin=subprocess.DEVNULL)
    chosen = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert chosen <= set(wheels)


def test_requirements_admit_every_torch_of_the_matrix() -> None:
    for project in PROJECTS:
        (torch,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
        # Without an upper bound, pip never replaces a torch that is newer than this release.
        assert str(torch.specifier) == ">=2.7", project["name"]
        assert torch.specifier.contains("2.13.0+cpu") and torch.specifier.contains("2.7.1+cu128")


def test_the_npu_extra_admits_the_torch_npu_of_each_torch() -> None:
    (npu,) = map(Requirement, CORE["optional-dependencies"]["npu"])
    for version in ("2.7.1", "2.7.1.post11", "2.9.0.post9", "2.13.0", "2.14.0"):
        assert npu.specifier.contains(version)
    assert not npu.specifier.contains("2.6.0.post5")


def test_the_newest_tested_torch_is_the_same_in_every_list() -> None:
    newest = ".".join(map(str, NEWEST_TORCH))
    assert f"Torch 2.7 to {newest} are tested" in (ROOT / "docs/install.md").read_text()
    assert f"versions=${{TORCH:-2.7.1 {newest}.0}}" in (ROOT / ".ci/nightly").read_text()
    for name, versions in (("ci", f'"2.7.1", "2.13.0", "{newest}.0"'), ("nightly", f'"2.7.1", "{newest}.0"')):
        assert f"torch: [{versions}]" in (ROOT / f".github/workflows/{name}.yml").read_text()


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [("linux", "x86_64", "decord"), ("linux", "aarch64", "decord2"), ("darwin", "arm64", None)],
)
def test_decord_is_asked_for_where_it_has_a_wheel(system: str, machine: str, wanted: str | None) -> None:
    where = {"sys_platform": system, "platform_machine": machine}
    marked = {r.name: r.marker for r in map(Requirement, CORE["dependencies"]) if r.marker is not None}
    assert [name for name, marker in marked.items() if marker.evaluate(where)] == [wanted] * bool(wanted)
    assert "av" in {r.name for r in map(Requirement, CORE["dependencies"]) if r.marker is None}


def test_drawing_and_tensorboard_are_extras_that_the_environment_of_developers_has() -> None:
    extras, wanted = CORE["optional-dependencies"], {"matplotlib", "tensorboard"}
    assert not wanted & {r.name for r in map(Requirement, CORE["dependencies"])}
    assert {*extras["plots"], *extras["tensorboard"]} <= {*extras["dev"]}


def test_the_version_has_one_value() -> None:
    assert CORE["dynamic"] == ["version"] and "version" not in CORE
    assert wheels_check.declared_version(ROOT) == mm_core.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    if ".dev" not in mm_core.__version__:  # a version that is released has its section
        assert re.search(rf"^## {re.escape(mm_core.__version__)}\b", changes, re.M)


def test_every_plugin_admits_this_core() -> None:
    for project in PLUGINS:
        (core,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "mm-core"]
        assert core.specifier.contains(mm_core.__version__) and not core.specifier.contains("0.2.0")


def test_every_project_is_apache_licensed() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS" in text
    for project in PROJECTS:
        assert project["license"] == "Apache-2.0"
    for folder in ROOT.glob("plugins/*/pyproject.toml"):
        assert (folder.parent / "LICENSE").read_text() == text


def test_configs_of_plugins_are_links_into_their_packages() -> None:
    links = sorted((ROOT / "configs").iterdir())
    assert [link.name for link in links] == ["custom_dit", "diffusers", "internvl", "wan"]
    for link in links:
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == ROOT / f"plugins/mm_{link.name}/mm_{link.name}/configs"
        assert list(link.glob("*.yaml"))


def test_constraints_fix_every_direct_dependency_to_one_version_it_admits() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {
        r.name.lower().replace("_", "-"): r
        for r in map(Requirement, (x for x in lines if not x.startswith("#")))
    }
    wanted = [r for p in PROJECTS for r in map(Requirement, p["dependencies"])]
    wanted += [Requirement(r) for extra in ("dev", "docs") for r in CORE["optional-dependencies"][extra]]
    for requirement in wanted:
        name = requirement.name.lower().replace("_", "-")
        if name == "mm-core":
            continue
        (pin,) = fixed[name].specifier
        assert pin.operator == "==" and not Version(pin.version).local
        assert requirement.specifier.contains(pin.version), requirement
    assert not [name for name in fixed if name.startswith(("nvidia", "cuda", "triton"))]
    assert not [line for line in lines if "://" in line or line.startswith("-")]
