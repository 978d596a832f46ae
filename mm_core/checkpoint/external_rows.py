"""The part of a checkpoint's manifest that lists frozen weights stored in other files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mm_core.checkpoint.files.layout import Document
from mm_core.errors import CheckpointError

RECIPE = ("format", "weights", "strict", "include", "exclude", "prefixes")
"""Keys of `init_from` that set how the tensors of a file are matched with those of the task."""


@dataclass(frozen=True)
class ExternalRow:
    """One manifest entry about frozen weights that a checkpoint leaves in other files.

    Attributes:
        key: the config key that names the files.
        path: where they are; None if the path came from an environment variable.
        tensors: how many tensors are read from them.
        sha256: of these tensors.
        recipe: how the names of the tensors are matched (keys as in `RECIPE`).
    """

    key: str
    path: str | None
    tensors: int
    sha256: str
    recipe: Document = field(default_factory=dict)


def rows_in(manifest: Document, checkpoint: Path) -> list[ExternalRow]:
    """The frozen weights that a checkpoint leaves in other files, as its manifest lists them.

    The files are not checked. [] for a checkpoint that contains all weights.
    """
    return [_row(row, checkpoint) for row in manifest.get("base") or ()]


def _row(row: Document, checkpoint: Path) -> ExternalRow:
    try:
        recipe = {key: row[key] for key in RECIPE}
        recipe |= {key: tuple(map(str, row[key])) for key in ("include", "exclude")}
        recipe["prefixes"] = {str(key): str(value) for key, value in row["prefixes"].items()}
        path = None if row["path"] is None else str(row["path"])
        return ExternalRow(str(row["key"]), path, int(row["tensors"]), str(row["sha256"]), recipe)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            "the manifest entry about frozen weights in other files cannot be read",
            where=str(checkpoint),
            hint="load it with the version of mm-core that wrote it, or a newer one",
        ) from None
