"""Files and folders that an export copies unchanged: tokenizers, schedulers, frozen models."""

from __future__ import annotations

import shutil
from pathlib import Path

from mm_core.errors import CheckpointError
from mm_core.files import durable
from mm_core.weights.stored import TORCH_SUFFIXES, missing_at, open_whole


def copy_verbatim(origin: Path, target: Path) -> None:
    """Copies a file or folder into an export; for a link, the file behind it is copied.

    Raises:
        CheckpointError: there is no such file or folder, or a link in it leads out of its folder (other
            files of this machine would be published) or to a folder. In a hub's cache, `blobs` beside
            `snapshots` counts as inside.
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
    """Checks files that an export will copy, before hours are spent on writing its weights.

    Raises:
        CheckpointError: `copy_verbatim` would refuse the file or folder, a safetensors file is truncated, or
            a model's folder lacks its weights, as where only configs were fetched from the hub.
    """
    paths = _checked(origin)
    for path in paths:
        if path.suffix == ".safetensors":
            open_whole(path)
    weights = any(path.suffix in (".safetensors", *TORCH_SUFFIXES) for path in paths)
    if (origin / "config.json").is_file() and (not weights or missing_at(origin)):
        raise CheckpointError(
            "weights of this part of the pipeline are missing",
            where=str(origin),
            hint="fetch or copy them, or name a complete pipeline with --pipeline (hub:org/name is fetched)",
        )


def _checked(origin: Path) -> list[Path]:
    """The files in `origin`, or `origin` itself: a CheckpointError if one cannot be copied safely."""
    if not origin.exists():
        raise CheckpointError(
            "the pipeline's folder lacks a file or folder that the export copies",
            where=str(origin),
            hint="restore it, or name a complete pipeline with --pipeline",
        )
    home = _home((origin if origin.is_dir() else origin.parent).resolve())
    found = [origin] if origin.is_file() else sorted(origin.rglob("*"))
    paths = [path for path in found if path.is_symlink() or not path.is_dir()]
    for path in paths:
        if not path.is_file() or not path.resolve().is_relative_to(home):
            raise CheckpointError(
                "the export copies only files inside the pipeline's folder; this is a link out of it, or"
                " not a file",
                where=str(path),
                hint="put a copy of the file in its place",
            )
    return paths


def _home(top: Path) -> Path:
    """The folder that links may point into."""
    for parent in top.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return top
