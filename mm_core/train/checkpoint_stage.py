"""A checkpoint in the making: the folder that it is written in before it has its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_retention import stage_name
from mm_core.train.run_lock import RunLock


def open_stage(final: Path, lock: RunLock) -> tuple[CheckpointError | None, Path]:
    """Makes the folder of a checkpoint that is to be called `final`; what to tell once it is saved, where the
    run's folder, whose lock is given, was removed meanwhile."""
    removed = lock.renew()
    if final.exists():
        raise CheckpointError(
            "this step has a checkpoint already, and none is ever overwritten",
            where=str(final),
            hint="choose another run.name, or move the folder away",
        )
    stage = final.with_name(stage_name(final.name))
    stage.mkdir(parents=True)
    return removed, stage


def discard(ranks: Ranks, stage: Path) -> None:
    """Rank 0 removes what was not completed."""
    if ranks.rank == 0:
        shutil.rmtree(stage, ignore_errors=True)


def complete(stage: Path, manifest: Mapping[str, files.Checksum]) -> None:
    """Rank 0 sees every rank's files, and lists them: from here on the checkpoint is complete."""
    unseen = sorted(name for name in manifest if not (stage / name).is_file())
    if unseen:
        raise CheckpointError(
            f"files that other ranks wrote are not here: {files.listed(unseen)}",
            where=str(stage),
            hint="run.dir must lie on a file system that all nodes share",
        )
    files.write_manifest(stage, manifest)
    files.sync_folder(stage)


def to_json(facts: Mapping[str, Any]) -> str:
    """Facts as JSON text."""
    try:
        return json.dumps(dict(facts), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as fault:
        raise CheckpointError(f"the facts of a checkpoint must be JSON: {fault}") from None
