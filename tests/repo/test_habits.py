"""What people who join the project rely on: CI, targets of make, fragments of the changelog, short pages."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from mm_core.device.kind import NEWEST_TORCH

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def commands_of(workflow: str) -> list[str]:
    jobs = WORKFLOWS[workflow]["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_ci_runs_the_script_on_the_oldest_and_newest_python_and_torch() -> None:
    """And on the torch of the constraints, with which everything was developed."""
    (job,) = WORKFLOWS["ci"]["jobs"].values()
    matrix = job["strategy"]["matrix"]
    pythons = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == [pythons[0], pythons[-1]]
    (torch,) = [r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "torch"]
    oldest = next(minor for minor in range(40) if torch.specifier.contains(f"2.{minor}.1"))
    own = re.search(r"^torch==(.*)\.\d+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert own is not None
    assert [version.rpartition(".")[0] for version in matrix["torch"]] == [
        f"2.{oldest}",
        own[1],
        ".".join(map(str, NEWEST_TORCH)),
    ]
    assert ".ci/run" in commands_of("ci")


def test_ci_can_change_the_version_of_torch_by_one_line_of_the_constraints() -> None:
    (line,) = [command for command in commands_of("ci") if command.startswith("sed ")]
    command = line.replace("${{ matrix.torch }}", "2.7.1").partition(" > ")[0]
    changed = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    before = (ROOT / "constraints.txt").read_text().splitlines()
    assert [new for old, new in zip(before, changed, strict=True) if old != new] == ["torch==2.7.1"]


def test_workflows_call_scripts_and_targets_that_are_there() -> None:
    assert {"ci", "nightly"} <= set(WORKFLOWS)
    for name in WORKFLOWS:
        for command in commands_of(name):
            first, *rest = command.split()
            assert first in ("sed", "make") or (ROOT / first).is_file(), command
            assert first != "make" or set(rest) <= TARGETS, command


def test_make_help_has_a_line_for_each_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", shown, re.M))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony is not None and set(lines) == set(phony[1].split())
    assert {"format", "types", "test", "slow", "nightly", "docs"} <= set(lines)
    assert all(len(text) <= 110 for text in lines.values())


CHOOSER = ROOT / ".github/ISSUE_TEMPLATE/config.yml"  # no form: the page on which a form is chosen
FRAGMENTS = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
KINDS = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_of_the_changelog_has_a_name_that_towncrier_takes(path: Path) -> None:
    name = re.fullmatch(r"(\d+|\+[\w-]+)\.(\w+)(\.\d+)?\.md", path.name)
    assert name is not None and name[2] in KINDS, f"changes/README.md has the names: {sorted(KINDS)}"
    text = path.read_text().strip()
    assert text.endswith(".") and not text.startswith(("#", "-"))
    assert len(text.split()) <= 70, "one or two sentences: a second change is a second fragment"


def test_the_types_of_fragments_are_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", (ROOT / "changes/README.md").read_text(), re.M)
    assert set(explained) == KINDS
    assert PROJECT["tool"]["towncrier"]["start_string"] in (ROOT / "CHANGELOG.md").read_text()


def test_a_commit_is_checked_by_the_tools_of_make_venv() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        first, second, *_ = hook["entry"].split()
        assert (first, second) in {
            (".venv/bin/ruff", "check"),
            (".venv/bin/ruff", "format"),
            ("make", "check-pages"),
            (".venv/bin/python", "-m"),
        }


def test_the_editor_has_the_widths_that_lint_and_pages_keep() -> None:
    sections = re.split(r"^\[(.+)\]$", (ROOT / ".editorconfig").read_text(), flags=re.M)
    widths = {
        name: re.search(r"max_line_length = (\d+)", body)
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    python, pages = widths["*.py"], widths["*.md"]
    assert python is not None and int(python[1]) == PROJECT["tool"]["ruff"]["line-length"]
    assert pages is not None and int(pages[1]) == 120


def test_the_short_pages_are_there_and_what_they_name_too() -> None:
    for name in ("SECURITY", "CODE_OF_CONDUCT", "RELEASING", "CONTRIBUTING"):
        text = (ROOT / f"{name}.md").read_text()
        named = re.findall(r"`((?:\.github|\.ci|docs|changes|tests|mm_core|benchmarks)/[\w./-]*)`", text)
        assert [path for path in named if not (ROOT / path).exists()] == [], name
    assert "plugins.path" in (ROOT / "SECURITY.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["project"]["license"]
    assert "version" not in citation, "the version has one home, mm_core/__init__.py"


@pytest.mark.parametrize(
    "path", sorted({*ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")} - {CHOOSER}), ids=lambda path: path.name
)
def test_an_issue_s_form_has_what_the_forge_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["body"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])
