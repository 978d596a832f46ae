"""Choosing the checkpoint that a run resumes from, and finding damage before the checkpoint is used."""

from __future__ import annotations

from pathlib import Path

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import DOING, verify
from mm_core.checkpoint.retention import complete_steps, incomplete_steps
from mm_core.config.yaml_nodes import read_file
from mm_core.errors import CheckpointError, ConfigError, MMError
from mm_core.runtime.ranks import Ranks

_SECTIONS = ("run", "task", "data", "train", "optimizer", "lr_schedule", "engine", "checkpoint", "log")


def newest_whole(folder: Path, ranks: Ranks) -> tuple[OpenedCheckpoint | None, list[CheckpointError]]:
    """The newest undamaged checkpoint of a run, and an error for each newer, damaged one.

    Called by all ranks. The `where` of each error is the damaged checkpoint.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    steps, incomplete = ranks.on_first(
        "reading the checkpoint folder", lambda: (complete_steps(folder), incomplete_steps(folder))
    )
    refused = [
        CheckpointError(
            "this checkpoint is incomplete: it has no checksums.json (an interrupted copy or deletion)",
            where=str(path),
            hint="copy it again, or use another checkpoint",
        )
        for path in incomplete
    ]
    for step in sorted(steps, reverse=True):
        try:
            checkpoint = verify(OpenedCheckpoint(steps[step]), ranks)
            examine(checkpoint, ranks)
        except files.DamagedError as fault:
            what = f"{fault.what}, instead of {fault.accepted}" if fault.accepted else fault.what
            refused.append(CheckpointError(what, where=str(steps[step]), hint=fault.hint))
            continue
        return checkpoint, refused
    if refused:
        newer = {fault.hint for fault in refused} == {files.UPGRADE}
        raise CheckpointError(
            f"every checkpoint of this run is {'unreadable' if newer else 'damaged'}: {refused[0].what}",
            where=str(folder),
            hint=files.UPGRADE
            if newer
            else "start a new run under another run.name, for example from another run's weights (init_from)",
        )
    return None, []


def examine(checkpoint: OpenedCheckpoint, ranks: Ranks) -> None:
    """Checks everything in a checkpoint that a resume uses except its tensors.

    Damage is found while another checkpoint can still be chosen. Called by all ranks, after `verify`.

    Raises:
        DamagedError: on all ranks, if any of them finds an invalid value.
    """
    ranks.agree(DOING, lambda: _examine(checkpoint, ranks))


def _examine(checkpoint: OpenedCheckpoint, ranks: Ranks) -> None:
    folder = checkpoint.folder
    _ = checkpoint.facts, checkpoint.manifest
    try:
        _ = checkpoint.adapters, checkpoint.external
    except CheckpointError as fault:
        raise files.DamagedError(f"manifest.json: {fault.what}", where=str(folder), hint=fault.hint) from None
    dcp.check_archives(folder, checkpoint.metadata, checkpoint.share(ranks))
    if (found := _fault_in_config(folder)) is not None:
        raise files.DamagedError(f"config.yaml: {found}", where=str(folder), hint=files.OTHER)


def _fault_in_config(folder: Path) -> str | None:
    """Why config.yaml is not a mapping of sections; None if it is. Components check the sections' content."""
    faults: list[MMError] = []
    try:
        tree = read_file(folder / files.CONFIG, faults)
    except ConfigError as fault:
        return fault.what
    if faults:
        return faults[0].what
    if not isinstance(tree.value, dict):
        return "the file does not contain a mapping"
    held = {name: tree.value[name].value for name in _SECTIONS if name in tree.value}
    return next(
        (f"{name} is not a mapping" for name, value in held.items() if not isinstance(value, dict)), None
    )
