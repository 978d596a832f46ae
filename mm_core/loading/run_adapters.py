"""The adapters of a run, from its checkpoints, and its task with them."""

from __future__ import annotations

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule
from mm_core.plan import build_task
from mm_core.weights.adapters.inject import Structure


def task_of(config: RunConfig, checkpoint: OpenedCheckpoint | None) -> TaskModule:
    """Builds a run's task with the adapters in its checkpoint; `checkpoint` is None for a run without one."""
    return build_task(config, checkpoint.adapters if checkpoint is not None else {})


def adapters_begun(config: RunConfig) -> Structure:
    """The adapters in a run's newest checkpoint, if its config starts adapters from files; else {}.

    For a plan that is only shown (`--dry-run`).
    """
    if all(adapter.from_ is None for adapter in config.train.adapters):
        return {}
    steps = complete_steps(config.run.folder / "checkpoints")
    return OpenedCheckpoint(steps[max(steps)]).adapters if steps else {}
