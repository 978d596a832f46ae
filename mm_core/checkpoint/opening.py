"""Choosing the checkpoint that a run goes on from. What is wrong with it is found before its use."""

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


def newest_whole(folder: Path) -> tuple[OpenedCheckpoint | None, list[CheckpointError]]:
    """The newest checkpoint of a run that has no fault, and the faults of the newer ones, whose `where` is
    the checkpoint. Called by all ranks. CheckpointError where all of them are damaged."""
    ranks = Ranks.current()
    steps, torn = ranks.on_first(
        "reading the checkpoint folder", lambda: (complete_steps(folder), incomplete_steps(folder))
    )
    refused = [
        CheckpointError("this checkpoint is incomplete: it has no checksums.json", where=str(path))
        for path in torn
    ]
    for step in sorted(steps, reverse=True):
        try:
            checkpoint = verify(OpenedCheckpoint(steps[step]))
            examine(checkpoint)
        except files.DamagedError as fault:
            what = f"{fault.what}, instead of {fault.accepted}" if fault.accepted else fault.what
            refused.append(CheckpointError(what, where=str(steps[step]), hint=fault.hint))
            continue
        return checkpoint, refused
    if refused:
        raise CheckpointError(
            f"every checkpoint of this run is damaged: {refused[0].what}",
            where=str(folder),
            hint="begin anew under another run.name, perhaps with another run's weights (init_from)",
        )
    return None, []


def examine(checkpoint: OpenedCheckpoint) -> None:
    """Reads all that a run goes by but the tensors themselves, so that damage is found while another
    checkpoint can still be taken. Called by all ranks, after `verify`.

    Raises:
        DamagedError: on all ranks, when any of them finds a value that cannot be true.
    """
    ranks = Ranks.current()
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
    """Why config.yaml is no mapping of sections. What stands in them is for the components to judge."""
    faults: list[MMError] = []
    try:
        tree = read_file(folder / files.CONFIG, faults)
    except ConfigError as fault:
        return fault.what
    if faults:
        return faults[0].what
    if not isinstance(tree.value, dict):
        return "the file holds no mapping"
    held = {name: tree.value[name].value for name in _SECTIONS if name in tree.value}
    return next(
        (f"{name} is no mapping" for name, value in held.items() if not isinstance(value, dict)), None
    )
