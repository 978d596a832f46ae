"""The pages describe what the code does, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from mm_core import contracts
from mm_core.device.kind import NEWEST_TORCH
from mm_core.plugin.checks.contract import members_of
from mm_core.plugin.hookspecs import COMPONENT_KINDS, KINDS
from mm_core.plugin.kinds import title_of
from mm_core.runtime.launch.signals import SIGNALS, STOPPED
from mm_core.testing.kit import kit_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *DOCS.rglob("*.md"),
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("SECURITY.md", "RELEASING.md", "CODE_OF_CONDUCT.md", "changes/README.md")),
    *ROOT.glob("plugins/*/README.md"),
]


def test_the_page_of_hooks_is_what_its_generator_writes() -> None:
    check = [sys.executable, str(DOCS / "generate_hooks.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    headings = re.findall(r"^## `(\w+)`$", (DOCS / "hooks.md").read_text(), re.M)
    assert headings == list(KINDS.values())


def test_the_pages_of_kinds_are_what_their_generator_writes() -> None:
    """A kind, a member of its contract or a check that is added is on its page, beside its template."""
    check = [sys.executable, str(DOCS / "generate_kinds.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for kind, contract in COMPONENT_KINDS.items():
        page = (DOCS / f"kinds/{kind}.md").read_text(encoding="utf-8")
        named = [*members_of(contract), *kit_of(kind).checks]
        assert [name for name in named if f"`{name}" not in page] == [], kind
        assert f"kinds/{kind}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_page_of_the_architecture_is_what_its_generator_writes() -> None:
    check = [sys.executable, str(DOCS / "generate_architecture.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rooms = {path.parent.name for path in (ROOT / "mm_core").glob("*/__init__.py")}
    named = set(re.findall(r"^\| \d+ \| `(\w+)", (DOCS / "architecture.md").read_text(), re.M))
    assert rooms <= named


def test_the_pages_of_the_api_are_what_their_generator_writes() -> None:
    check = [sys.executable, str(DOCS / "generate_api.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Dataset" in contracts.__all__
    page = (DOCS / "api/mm_core.contracts.md").read_text()
    (listed,) = re.findall(r"members: \[(.*)\]", page)
    assert set(listed.split(", ")) == set(contracts.__all__)


def test_the_drawing_is_what_its_script_draws_and_its_rooms_are_there() -> None:
    check = [sys.executable, str(DOCS / "generate_flow.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    drawing = ElementTree.parse(DOCS / "assets/flow.svg").getroot()
    texts = list(drawing.iter("{http://www.w3.org/2000/svg}text"))
    named = {room for text in texts if text.get("class") == "rooms" for room in (text.text or "").split(", ")}
    assert len(named) >= 12 and {room for room in named if not (ROOT / "mm_core" / room).is_dir()} == set()
    for page in ("index.md", "architecture.md"):
        assert "](assets/flow.svg)" in (DOCS / page).read_text()


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [name for child in children for name in files(child)]

    nav = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_environment_variables_that_the_core_reads_are_documented() -> None:
    read = {
        name
        for file in (ROOT / "mm_core").rglob("*.py")
        for name in re.findall(r"\bMM_(?:PLUGINS\w*|DEVICE|DEBUG)\b", file.read_text())
    }
    written = set(re.findall(r"\bMM_[A-Z_]+\b", "".join(p.read_text() for p in DOCS.glob("*.md"))))
    assert read and read <= written


def test_the_page_on_launching_names_the_signals_and_links_to_the_exit_codes() -> None:
    text = (DOCS / "launching.md").read_text()
    for page in PAGES:  # where two are named together, all are
        for paragraph in page.read_text(encoding="utf-8").replace("Ctrl-C", "SIGINT").split("\n\n"):
            if len(named := {each.name for each in SIGNALS if each.name in paragraph}) > 1:
                assert len(named) == len(SIGNALS), (page, named)
    assert "(ranks.md#exit-codes)" in text
    assert f"| {STOPPED} | saved and stopped on request" in (DOCS / "ranks.md").read_text()
    assert {signal.name for signal in SIGNALS} <= set(re.findall(r"SIG[A-Z]+\d?", text))


def test_a_message_names_a_page_by_its_title_because_pip_installs_no_pages() -> None:
    titles = {page.read_text(encoding="utf-8").partition("\n")[0] for page in DOCS.rglob("*.md")}
    assert {f"# {title_of(kind)}" for kind in KINDS} <= titles
    named = set()
    for file in [*ROOT.glob("mm_core/**/*.py"), *ROOT.glob("plugins/*/mm_*/**/*.py")]:
        text = file.read_text(encoding="utf-8")
        named |= set(re.findall(r'[Tt]he page \\?"([\w \'-]+)', text))
        assert not re.findall(r"(?<![\w/.])docs/[\w/{}-]+(?:\.md)?", text), file
    assert len(named) > 3 and {f"# {title}" for title in named} <= titles


def test_the_matrix_of_versions_covers_every_torch_that_is_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    rows = re.findall(r"^\| (2\.[\d., ]+) \|", (DOCS / "install.md").read_text(), re.M)
    named = {Version(v.strip()).minor for row in rows for v in row.split(",")}
    tested = range(NEWEST_TORCH[1] + 1)
    assert named == {minor for minor in tested if torch.specifier.contains(f"2.{minor}.0")}
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    header = next(
        line for line in (DOCS / "install.md").read_text().splitlines() if line.startswith("| torch")
    )
    assert re.findall(r"3\.\d+", header) == pythons


def test_contributing_is_one_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
