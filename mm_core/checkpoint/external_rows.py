"""What a checkpoint's manifest tells of frozen weights that lie in other files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mm_core.checkpoint.files.layout import Document
from mm_core.errors import CheckpointError

RECIPE = ("format", "weights", "strict", "include", "exclude", "prefixes")
"""Keys of `init_from` by which the tensors of a file are matched with those of the task."""


@dataclass(frozen=True)
class ExternalRow:
    """What a manifest says of frozen weights elsewhere. key: of the config, that named them. path: None where
    the environment named the place. recipe: how their names are matched."""

    key: str
    path: str | None
    tensors: int
    sha256: str
    recipe: Document = field(default_factory=dict)


def rows_in(manifest: Document, checkpoint: Path) -> list[ExternalRow]:
    """What a checkpoint with this manifest leaves to other files, unchecked; [] for one that holds all."""
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
            "what this checkpoint says of the weights below is not understood",
            where=str(checkpoint),
            hint="load it with the version of mm-core that wrote it, or a newer one",
        ) from None
