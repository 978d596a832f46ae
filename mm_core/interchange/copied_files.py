"""Files and folders that an export takes over as they are: tokenizers, schedulers, frozen models."""

from __future__ import annotations

import shutil
from pathlib import Path

from mm_core.errors import CheckpointError
from mm_core.files import durable
from mm_core.weights.stored import open_whole


def copy_verbatim(origin: Path, target: Path) -> None:
    """Copies a file or a folder; what links point at is copied, never a link.

    Raises:
        CheckpointError: nothing is there, or a link in it leads out of its folder (something else of this
            machine would be published) or to a folder. A hub's cache keeps its contents in `blobs` beside
            `snapshots`: that counts as inside.
    """
    paths = _checked(origin)
    if origin.is_dir():
        target.mkdir(parents=True)
    for path in paths:
        place = target if path == origin else target / path.relative_to(origin)
        place.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, durable(place) as copy:
            shutil.copyfileobj(source, copy, 1 << 22)


def check_taken(origin: Path) -> None:
    """CheckpointError for what `copy_verbatim` would refuse, and for safetensors files that are cut off:
    known before hours are spent on writing what stands beside them."""
    for path in _checked(origin):
        if path.suffix == ".safetensors":
            open_whole(path)


def _checked(origin: Path) -> list[Path]:
    """The files that are taken over."""
    if not origin.exists():
        raise CheckpointError("this is missing, and the export needs it", where=str(origin))
    home = _home((origin if origin.is_dir() else origin.parent).resolve())
    found = [origin] if origin.is_file() else sorted(origin.rglob("*"))
    paths = [path for path in found if path.is_symlink() or not path.is_dir()]
    for path in paths:
        if not path.is_file() or not path.resolve().is_relative_to(home):
            raise CheckpointError(
                "this is no file of its folder (a link that leads out, say), so it is not taken over",
                where=str(path),
                hint="put the file itself there",
            )
    return paths


def _home(top: Path) -> Path:
    """The folder that links may lead to."""
    for parent in top.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return top
