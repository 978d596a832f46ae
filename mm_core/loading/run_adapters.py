"""The adapters of a run, as its checkpoints say, and its task with them."""

from __future__ import annotations

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule
from mm_core.plan import build_task
from mm_core.weights.adapters.inject import Structure


def task_of(config: RunConfig, checkpoint: OpenedCheckpoint | None) -> TaskModule:
    """The run's task as `build_task` makes it, with the adapters that a checkpoint of it holds; None without
    one."""
    return build_task(config, checkpoint.adapters if checkpoint is not None else {})


def adapters_begun(config: RunConfig) -> Structure:
    """Those of the run's newest checkpoint, where its config names files to begin with; {} before the
    first. For a plan that is only shown."""
    if all(adapter.from_ is None for adapter in config.train.adapters):
        return {}
    steps = complete_steps(config.run.folder / "checkpoints")
    return OpenedCheckpoint(steps[max(steps)]).adapters if steps else {}
