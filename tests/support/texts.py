"""The files of the repository that people read."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def texts() -> list[Path]:
    """Every file of the repository that somebody reads as text; links are left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [Path(name) for name in listed.stdout.split("\0")[:-1]]
    kinds = {".py", ".md", ".yaml", ".yml", ".toml", ".js", ".css", ".html", ".cff", ".svg", ".txt"}
    kept = [
        path
        for path in files
        if (path.suffix in kinds or path.name == "Makefile" or path.parts[0] == ".ci")
        and not (ROOT / path).is_symlink()
    ]
    return [path for path in kept if (ROOT / path).is_file()]
