"""Copies of the repository: one to run the commands of its pages, one to build its wheels, once per
session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import shells

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = (ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files with a small dataset, so that commands do not change the real
    files."""
    folder = tmp_path_factory.mktemp("workspace") / "repository"
    passing = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")

    def ignore(directory: str, names: list[str]) -> set[str]:
        # Output of commands at the top; mm_core/data, mm_core/cli/runs and tests/runs are sources.
        own = {"data", "runs", "site"} if Path(directory) == ROOT else set()
        return passing(directory, names) | own

    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignore)
    render = [sys.executable, "examples/shapes/render.py", "--clips", "64"]
    subprocess.run(render, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for this environment's own (see shells.py)."""
    return tmp_path_factory.mktemp("programs") / "venv"


@pytest.fixture(scope="session")
def run(workspace: Path, programs: Path) -> Run:
    """Runs a shell line in the workspace, with this environment's commands first on the path. VENV of a
    Makefile may be `$SHELL_VENV`."""

    def call(line: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            ["bash", "-c", line],
            cwd=workspace,
            env=shells.environment(programs, SHELL_VENV=str(programs), **environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == code, f"{line}\n{result.stdout}\n{result.stderr}"
        return result

    return call


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels by distribution name, built from a copy because a build writes into the source folder."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    keep_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    source.mkdir()
    for name in ("mm_core", "plugins"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=keep_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    projects = [source / path.relative_to(ROOT) for path in PROJECTS]
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--wheel-dir", str(folder / "wheels"), *map(str, projects)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return {
        file.name.split("-")[0].replace("_", "-"): file for file in sorted((folder / "wheels").glob("*.whl"))
    }
