"""Tar files with members of any name."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def archive(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content), kind
            file.addfile(info, io.BytesIO(content))
    return path
