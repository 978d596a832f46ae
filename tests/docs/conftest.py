"""A copy of the repository to run the README's commands in, with a small dataset."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files; what commands write does not reach the real ones."""
    folder = tmp_path_factory.mktemp("workspace") / "repository"
    passing = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "site", "build")

    def ignore(directory: str, names: list[str]) -> set[str]:
        own = {"data"} if Path(directory) == ROOT else set()  # mm_core/data is a package
        return passing(directory, names) | own

    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignore)
    render = [sys.executable, "examples/shapes/render.py", "--clips", "64"]
    subprocess.run(render, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def run(workspace: Path) -> Run:
    """Runs a shell line in the workspace, with this environment's commands first on the path."""

    def call(line: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = subprocess.run(
            ["bash", "-c", line],
            cwd=workspace,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == code, f"{line}\n{result.stdout}\n{result.stderr}"
        return result

    return call
