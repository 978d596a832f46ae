"""Checks the contents of this repository's wheels. Used by .ci/run, on wheels of tracked files, and by tests.

python tests/repo/wheels.py dist/*.whl
"""

from __future__ import annotations

import ast
import configparser
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def project_of(distribution: str) -> Path:
    """The folder whose pyproject.toml names the distribution."""
    for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        if tomllib.loads(file.read_text())["project"]["name"] == distribution:
            return file.parent
    raise ValueError(f"no project here is named {distribution!r}")


def declared_version(project: Path) -> str:
    """The version that a project's wheel must have. The core's version is in its source only."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())
    if "version" not in declared["project"].get("dynamic", []):
        return str(declared["project"]["version"])
    module, _, name = declared["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    for node in ast.parse((project / module / "__init__.py").read_bytes()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets):
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{module} sets no {name}")


def expected_files(project: Path) -> set[str]:
    """Paths within the wheel of all sources and YAMLs of the project's package, and of its py.typed."""
    packages = [p.parent for p in project.glob("mm_*/__init__.py")]
    found = {
        str(file.relative_to(project))
        for package in packages
        for pattern in ("*.py", "*.yaml", "*.css", "*.js")
        for file in package.rglob(pattern)
        if file.is_file()
    }
    return found | {f"{package.name}/py.typed" for package in packages}


def faults_of(wheel: Path) -> list[str]:
    """All errors of a wheel as messages; empty for a correct wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = configparser.ConfigParser(delimiters=("=",))
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    project = project_of(metadata["Name"])
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    faults = [f"{name} is missing" for name in sorted(expected_files(project) - names)]
    faults += [
        f"{name} does not belong into a wheel"
        for name in sorted(names)
        if not name.startswith((f"{info}/", "mm_")) or "/tests/" in name or name.endswith(".pyc")
    ]
    if f"{info}/licenses/LICENSE" not in names:
        faults.append("LICENSE is missing")
    if metadata["License-Expression"] != "Apache-2.0":
        faults.append(f"License-Expression is {metadata['License-Expression']!r}, not Apache-2.0")
    if metadata["Version"] != (version := declared_version(project)):
        faults.append(f"Version is {metadata['Version']}, the sources have {version}")
    groups = {"mm_core.plugins": declared["entry-points"]["mm_core.plugins"]}
    if "scripts" in declared:
        groups["console_scripts"] = declared["scripts"]
    for group, wanted in groups.items():
        found = dict(entry_points[group]) if entry_points.has_section(group) else {}
        if found != wanted:
            faults.append(f"entry points [{group}] are {found}, not {wanted}")
    return faults


def main(wheels: list[str]) -> int:
    """Returns 0 if every wheel is correct, else 1."""
    if not wheels:
        print("usage: python tests/repo/wheels.py WHEEL ...", file=sys.stderr)
        return 2
    wrong = 0
    for wheel in map(Path, wheels):
        faults = faults_of(wheel)
        wrong += bool(faults)
        print(f"{wheel.name}: {'ok' if not faults else '; '.join(faults)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
