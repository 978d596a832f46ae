"""Wheels of every project of the repository, built once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = (ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> its wheel, built from a copy: building writes into the source folder."""
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
