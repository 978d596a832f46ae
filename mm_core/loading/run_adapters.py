"""The adapters of a run, as its checkpoints say, and its task with them."""

from __future__ import annotations

from pathlib import Path

from mm_core.checkpoint.reading import read_run_manifest
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.schema import RunConfig
from mm_core.contracts import TaskModule
from mm_core.plan import build_task
from mm_core.weights.adapters.inject import Structure
from mm_core.weights.adapters.record import structure_in


def adapters_in(checkpoint: Path | None) -> Structure:
    """The adapters that a checkpoint holds; {} without one, and for one that does not say."""
    if checkpoint is None:
        return {}
    return structure_in(read_run_manifest(checkpoint).get("adapters"), checkpoint)


def task_of(config: RunConfig, checkpoint: Path | None) -> TaskModule:
    """The run's task as `build_task` makes it, with the adapters that a checkpoint of it holds; None without
    one."""
    return build_task(config, adapters_in(checkpoint))


def adapters_begun(config: RunConfig) -> Structure:
    """Those of the run's newest checkpoint, where its config names files to begin with; {} before the
    first. For a plan that is only shown."""
    if all(adapter.from_ is None for adapter in config.train.adapters):
        return {}
    steps = complete_steps(config.run.folder / "checkpoints")
    return adapters_in(steps[max(steps)]) if steps else {}
